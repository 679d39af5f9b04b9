"""A larger drafter that says what a smaller one said: more tokens and a wider MLP, for training to go on from.

New units of the MLP begin with no way out, so that nothing changes; rows of new tokens come from the target's head,
carried over by the linear map that best takes the target's rows of the known tokens to the drafter's.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from outrider.core.errors import InputError
from outrider.models import LoadedModel
from outrider.models.networks.eagle3 import Eagle3Layer
from outrider.train.reshape.trim import token_counts
from outrider.train.text.selfdata import SelfData


@torch.no_grad()
def widened(net: Eagle3Layer, target: LoadedModel, data: SelfData, vocab: int, intermediate: int) -> Eagle3Layer:
    """A copy with so many tokens, the new ones those that answers use most, and so wide an MLP; 0 leaves a size."""
    vocab, intermediate = vocab or net.shape.vocab, intermediate or net.shape.intermediate
    if (vocab, intermediate) == (net.shape.vocab, net.shape.intermediate):
        return net
    if vocab < net.shape.vocab or intermediate < net.shape.intermediate or net.shape.rank:
        raise InputError(
            f"a drafter of {net.shape.vocab} tokens and an MLP of {net.shape.intermediate} with a whole head can only "
            "grow; make a head smaller with: outrider train trim"
        )
    whole = target.model.get_output_embeddings().weight.float()
    ids = _more(net.ids.cpu(), token_counts(data, len(whole)), vocab).to(net.ids.device)
    made = Eagle3Layer(replace(net.shape, vocab=len(ids), intermediate=intermediate), ids).to(net.ids.device)
    weights = {name: weight.detach().float() for name, weight in net.state_dict().items()}
    made.load_state_dict({name: weights.get(name, weight) for name, weight in made.state_dict().items()} | {
        "lm_head.weight": _head(weights["lm_head.weight"], net.ids, whole, ids),
        **_mlp(weights, intermediate),
    })  # fmt: skip
    return made.requires_grad_(False)


def _more(ids: Tensor, counts: Tensor, size: int) -> Tensor:
    """These and the likeliest of the others, rising."""
    counts = counts.double()
    counts[ids] = torch.inf
    return torch.sort(counts, descending=True, stable=True).indices[:size].sort().values


def _head(rows: Tensor, old: Tensor, whole: Tensor, ids: Tensor) -> Tensor:
    carry = torch.linalg.lstsq(whole[old.to(whole.device)].cpu().double(), rows.cpu().double()).solution
    made = (whole[ids.to(whole.device)].cpu().double() @ carry).float().to(rows.device)
    made[torch.isin(ids, old)] = rows  # both rise
    return made


def _mlp(weights: dict[str, Tensor], wide: int) -> dict[str, Tensor]:
    made = {}
    for name in ("gate_proj", "up_proj"):
        weight = weights[f"midlayer.mlp.{name}.weight"]
        fresh = torch.empty(wide - len(weight), weight.shape[1], device=weight.device)
        made[f"midlayer.mlp.{name}.weight"] = torch.cat([weight, nn.init.normal_(fresh, std=0.02)])
    weight = weights["midlayer.mlp.down_proj.weight"]
    made["midlayer.mlp.down_proj.weight"] = nn.functional.pad(weight, (0, wide - weight.shape[1]))
    return made
