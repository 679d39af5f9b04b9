"""SlimSpec: a drafter's head as a product of two narrow matrices, so that every token stays within reach.

arXiv 2605.10453. logits = U (D h) with D [rank, d] and U [vocabulary, rank]: about rank / d of the bytes. Lossless.
Begins as the best product for the states the head really sees (a singular value decomposition weighted by their
covariance); `outrider train run --from` trains both factors on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from outrider.core.errors import InputError
from outrider.models import LoadedModel
from outrider.models.networks.eagle3 import Eagle3Layer
from outrider.train.kinds.eagle3 import answers, look, unrolled
from outrider.train.loop import parts
from outrider.train.reshape.trim import last_matrix, with_head
from outrider.train.text.selfdata import SelfData


def slimmed(net: Eagle3Layer, rank: int, second_moment: Tensor | None = None) -> Eagle3Layer:
    """The same network with a head of this rank. `second_moment`: the mean of h h^T over the head's inputs, [d, d]."""
    hidden = net.shape.hidden
    if net.shape.rank or not 1 <= rank <= hidden:
        raise InputError(f"rank {rank}: a head of one matrix can have a rank of 1 to {hidden}")
    moment = torch.eye(hidden) if second_moment is None else second_moment
    values, vectors = torch.linalg.eigh(moment.double().cpu())
    roots = values.clamp(min=float(values[-1]) * 1e-8).sqrt()  # directions never seen still have an inverse
    seen = (vectors * roots) @ vectors.T
    unseen = (vectors / roots) @ vectors.T
    u, s, v = torch.linalg.svd(last_matrix(net).double().cpu() @ seen, full_matrices=False)
    half = s[:rank].sqrt()
    down, up = (half[:, None] * v[:rank]) @ unseen, u[:, :rank] * half
    like = last_matrix(net)
    factors = (down.to(like.device, like.dtype).contiguous(), up.to(like.device, like.dtype).contiguous())
    return with_head(net, replace(net.shape, rank=rank), net.ids, *factors)


@torch.no_grad()
def second_moment(target: LoadedModel, net: Eagle3Layer, data: SelfData, steps: int = 3) -> Tensor:
    """Mean of h h^T over what the head reads where it says a token of an answer, in all unrolled steps: [d, d]."""
    total, count = torch.zeros(net.shape.hidden, net.shape.hidden, dtype=torch.float64), 0
    like = next(net.parameters()).dtype
    for part in parts(data, target.device):
        _, embedded, state = look(target, net, part.tokens)
        wanted = answers(part)
        for step, after in enumerate(unrolled(net, embedded.to(like), state, steps)):
            wanted[:, :step] = False  # a column whose chain would begin before the text
            rows = net.norm(after)[wanted].double().cpu()
            total, count = total + rows.T @ rows, count + len(rows)
    return total / max(count, 1)


def chain_length(rates: Sequence[float]) -> float:
    """Tokens a step of a chain with this acceptance at each depth: one, and each depth that is reached."""
    total, reach = 1.0, 1.0
    for rate in rates:
        reach *= rate
        total += reach
    return total
