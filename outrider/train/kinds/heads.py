"""A finished drafter with a smaller head, written as a drafter of its own and measured beside the one it came from."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.core.errors import InputError
from outrider.core.layer_driver import LayerPiece
from outrider.models import LoadedModel
from outrider.models.drafts import CARD, packed, read_card, write_drafter
from outrider.models.networks.eagle3 import Eagle3Layer
from outrider.models.trained import load_eagle3
from outrider.runtime.layers.choice import layer_driver
from outrider.train.kinds.eagle3 import Eagle3Learner, Eagle3Plan
from outrider.train.loop import split
from outrider.train.losses import LOSSES
from outrider.train.reshape.slim import chain_length, second_moment, slimmed
from outrider.train.reshape.trim import (
    Found,
    Ranking,
    SearchPlan,
    draft_flops,
    rank_tokens,
    search,
    token_counts,
    trimmed,
)
from outrider.train.text.dialogue import ANSWER
from outrider.train.text.selfdata import SelfData

KIND = "eagle3"
BEAM = 10  # rows that a tree level drafts together


@dataclass(frozen=True, slots=True)
class HeadPlan:
    vocab: int = 0  # tokens kept; 0: all
    rank: int = 0  # of the head; 0: one matrix
    look_for: bool = False  # search the number of tokens
    measured: bool = False  # the search weighs seconds on this machine, not operations
    held_out: int = 16  # sequences that only measure
    calibration: int = 32  # sequences whose states weigh the factors of a head of low rank
    searching: SearchPlan = SearchPlan()


@dataclass(frozen=True, slots=True)
class Measured:
    """One head: what it costs and what it reaches, teacher-forced on held-out answers."""

    vocab: int
    rank: int
    coverage: float  # share of held-out answer tokens it can say
    megabytes: float  # of the head in eight bits
    milliseconds: float  # of drafting one tree level
    greedy: float
    sampled: float
    chain: float  # accepted length of a greedy chain

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def make_head(
    drafter: Path, target: LoadedModel, data: SelfData, plan: HeadPlan, folder: Path
) -> tuple[Measured, Measured, Found | None]:  # fmt: skip
    """Changes the folder: the drafter with the smaller head. Figures of the whole head and of this one."""
    if (folder / CARD).exists():
        raise InputError(f"{folder} already holds a finished drafter; choose another folder or remove it")
    if not (plan.vocab or plan.rank or plan.look_for):
        raise InputError("nothing to make smaller: give a number of tokens, a rank, or let the size be searched")
    if len(data.tokens) <= plan.held_out:
        raise InputError(f"{len(data.tokens)} sequences are too few: {plan.held_out} are held out; write more tokens")
    held_out, text = split(data, plan.held_out)
    net = load_eagle3(drafter, target)
    ranking = ranked(net, target, text)
    found = None
    if plan.look_for:
        cost = draft_seconds(net, ranking) if plan.measured else lambda size: float(draft_flops(net.shape, size))
        found = search(ranking, cost, plan.searching)
    size = found.size if found else plan.vocab
    moment = _moment(net, target, text, plan.calibration) if plan.rank else None
    made = smaller(net, ranking, size, plan.rank, moment)
    figures = tuple(measured(either, target, held_out) for either in (net, made))
    card = read_card(drafter)
    about = {"vocab": made.shape.vocab, "rank": made.shape.rank, "search": asdict(found) if found else None}
    held = {"greedy": figures[1].greedy, "sampled": figures[1].sampled}
    card = replace(
        card, shape=made.shape.as_dict(), recipe={**card.recipe, "head": about}, acceptance={"held-out": held}
    )  # fmt: skip
    write_drafter(folder, packed(made.tensors(), bool(card.recipe.get("eight_bits"))), card)
    return figures[0], figures[1], found


def ranked(net: Eagle3Layer, target: LoadedModel, data: SelfData) -> Ranking:
    total = len(target.model.get_output_embeddings().weight)
    return rank_tokens(token_counts(data, total), net.ids.cpu(), target.eos_ids)


def smaller(net: Eagle3Layer, ranking: Ranking, vocab: int, rank: int, moment: Tensor | None = None) -> Eagle3Layer:
    """Factored first, for all its tokens, then cut; `moment` is the `second_moment` that weighs the factors."""
    if vocab > len(ranking.ids):
        raise InputError(f"{vocab} tokens: the drafter says {len(ranking.ids)}; train one with a larger --vocab")
    if rank:
        net = slimmed(net, rank, moment)
    return trimmed(net, ranking.keep(vocab)) if vocab else net


def _moment(net: Eagle3Layer, target: LoadedModel, text: SelfData, sequences: int = 32) -> Tensor:
    return second_moment(target, net, SelfData(text.tokens[:sequences], text.roles[:sequences]))


def measured(net: Eagle3Layer, target: LoadedModel, data: SelfData, depth: int = 5) -> Measured:
    coverage = float(torch.isin(data.tokens[data.roles == ANSWER].long(), net.ids.cpu()).float().mean())
    point = Eagle3Learner(target, net, Eagle3Plan(unroll=depth), LOSSES["kl"]).measure(data)
    numbers = sum(weight.numel() for name, weight in net.named_parameters() if name.startswith("lm_head."))
    return Measured(
        net.shape.vocab, net.shape.rank, coverage, numbers / 1e6, 1e3 * level_seconds(net), point.greedy,
        point.sampled, chain_length(point.depths),
    )  # fmt: skip


@torch.inference_mode()
def level_seconds(net: Eagle3Layer, rows: int = BEAM, rounds: int = 15, context: int = 128) -> float:
    """Median time to draft one level of a tree: the layer over `rows` candidates behind a context, head and choice.

    In the form that drafting runs: eight bits on a CPU, on kernels of our own where they have the network's shape.
    """
    shape, weight = net.shape, next(net.parameters())
    make = torch.Generator(weight.device).manual_seed(0)

    def some(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=make, device=weight.device, dtype=weight.dtype)

    embedded, state = some(1, rows, shape.hidden), some(rows, shape.hidden)
    driver = layer_driver(net, lambda tokens: embedded.view(*tokens.shape, shape.hidden))
    positions, sees = np.full(rows, context), np.eye(rows, dtype=bool)
    level = LayerPiece(0, context, context, positions, sees, [0] * rows, state)
    times = []
    for _ in range(rounds + 3):
        begun = time.perf_counter()
        driver.distributions(driver.forward([level]), [1.0], min(64, shape.vocab))
        times.append(time.perf_counter() - begun)
    return float(np.median(times[3:]))


def draft_seconds(net: Eagle3Layer, ranking: Ranking, points: int = 5) -> Callable[[int], float]:
    """Seconds a level by size of the vocabulary: measured at a few sizes, straight lines between."""
    total = len(ranking.ids)
    sizes = sorted({max(1, round(total * part / points)) for part in range(points + 1)})
    seconds = [level_seconds(trimmed(net, ranking.keep(size))) for size in sizes]
    rising = np.maximum.accumulate(seconds)  # a smaller head cannot cost more; what says so is noise
    return lambda size: float(np.interp(size, sizes, rising))


def heads_of(
    net: Eagle3Layer, target: LoadedModel, text: SelfData, sizes: Sequence[tuple[int, int]]
) -> Iterator[Eagle3Layer]:  # fmt: skip
    """The network with heads of (tokens, rank), 0 meaning all of them; tokens are ranked by their use in the text."""
    ranking = ranked(net, target, text)
    moment = _moment(net, target, text) if any(rank for _, rank in sizes) else None
    for vocab, rank in sizes:
        yield smaller(net, ranking, vocab, rank, moment)
