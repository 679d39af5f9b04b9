"""How near a choice of plain decoding was to another one, in units of raw logits.

Greedy: the gap between the two highest processed logits. Sampled with the target's noise: the smallest change of the
logits that lets another token win the race, be it by its score or by crossing the boundary of a truncation.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from outrider.core.noise import TARGET, StreamNoise, uniforms
from outrider.core.params import SamplingParams
from outrider.core.sampling import History


def chosen(history: History, loose: History, row: Tensor) -> tuple[int, float]:
    """The token that follows and its margin. `loose` is the same history without truncation."""
    params = history.params
    unit = _unit(params)
    if params.greedy:
        top = torch.topk(history.process(row).double(), 2)
        return int(history.process(row).argmax()), float(top.values[0] - top.values[1]) * unit
    assert params.seed is not None
    noise = StreamNoise(params.seed, 0, TARGET, history.hash, len(history.tokens))
    token = noise.pick(torch.softmax(history.process(row), 0), ())
    waits = -torch.log1p(-uniforms(noise.target_key(()), row.numel(), row.device))
    return token, race_margin(loose.process(row).double(), waits, token, params) * unit


def race_margin(scores: Tensor, waits: Tensor, winner: int, params: SamplingParams) -> float:
    """A rival must both overtake the winner and stand inside the truncation; or the winner must fall out of it."""
    inside, slack = boundary(scores, params)
    race = scores - waits.log()  # argmax of log p - log E is argmin of E / p
    ahead = (race[winner] - race).clamp(min=0.0)
    rivals = torch.where(inside, ahead, torch.maximum(ahead, slack))
    rivals[winner] = slack[winner]
    return float(rivals.min())


def boundary(scores: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """[V] which tokens the truncations keep, and how far each is at least from the other side (in scores).

    A token that is kept can fall out at any stage, so its slack is the smallest; one that is cut off has the distance
    to the stage that cut it.
    """
    inside = scores > -math.inf
    slack = torch.full_like(scores, math.inf)
    for stage in (_top_k, _top_p, _min_p):
        kept, distance = stage(scores.masked_fill(~inside, -math.inf), params)
        slack = torch.where(inside, torch.minimum(slack, distance), slack)
        slack = torch.where(inside & ~kept, distance, slack)
        inside = inside & kept
    return inside, slack


def _top_k(scores: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    k = params.top_k
    if not 0 < k < scores.numel():
        return _everything(scores)
    ordered = torch.topk(scores, k + 1).values
    return scores >= ordered[-2], torch.where(scores >= ordered[-2], scores - ordered[-1], ordered[-2] - scores)


def _top_p(scores: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    if params.top_p >= 1:
        return _everything(scores)
    values, order = torch.sort(scores, descending=True, stable=True)
    probs = torch.softmax(values, 0)
    before = probs.cumsum(0) - probs
    count = max(int((before < params.top_p).sum()), 1)
    kept = torch.arange(len(values), device=scores.device) < count
    mass, edge = probs[:count].sum(), math.log(params.top_p / (1 - params.top_p))
    behind = torch.cat([values[1:], values.new_tensor([-math.inf])])
    dropped = behind[count - 1]
    # A change that moves no difference of two by more than d moves no log-odds of a sum by more than d. So a token
    # falls out only where others pass it or their odds grow as far: those below it and the ones above, or those that
    # are dropped and all others that are kept. One that is dropped passes a kept one, or the odds of those shrink.
    either = torch.minimum(values - behind, edge - torch.logit(before.clamp(0, 1)))
    other = torch.minimum(values - dropped, edge - torch.logit((mass - probs).clamp(0, 1)))
    enters = torch.minimum(values[count - 1] - values, torch.logit(mass.clamp(0, 1)) - edge)
    distance = torch.where(kept, torch.maximum(either, other), enters).clamp(min=0)
    inside, back = torch.empty_like(kept), torch.empty_like(distance)  # in the order of the ids again
    inside[order], back[order] = kept, distance
    return inside, back


def _min_p(scores: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    if params.min_p == 0:
        return _everything(scores)
    distance = scores - (scores.max() + math.log(params.min_p))
    return distance >= 0, distance.abs()


def _everything(scores: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ones_like(scores, dtype=torch.bool), torch.full_like(scores, math.inf)


def _unit(params: SamplingParams) -> float:
    """Raw logits in one unit of processed ones: penalties and temperature stretch the noise of the precision too."""
    stretch = max(params.repetition_penalty, 1 / params.repetition_penalty)
    return (1.0 if params.greedy else params.temperature) / stretch
