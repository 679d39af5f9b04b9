"""How far a draft's next-token law q is from the target's p: the quantity that training lowers.

Rows of logits in, one number a row out; float32 throughout, since differences of small probabilities vanish in half
precision. Gradients reach q only.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Loss = Callable[[Tensor, Tensor], Tensor]  # target logits [n, vocabulary], draft logits [n, vocabulary] -> [n]


def kl(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """Forward Kullback-Leibler divergence, sum p log(p / q): every token the target may say must be likely."""
    log_p, log_q = p_logits.detach().float().log_softmax(-1), q_logits.float().log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def tvd(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """Total variation, half of sum |p - q|: one minus the chance that a drawn draft token is accepted."""
    p, q = p_logits.detach().float().softmax(-1), q_logits.float().softmax(-1)
    return 0.5 * (p - q).abs().sum(-1)


def mix(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """kl + tvd: the first has a gradient where q is far off, the second is what is wanted in the end."""
    log_p, log_q = p_logits.detach().float().log_softmax(-1), q_logits.float().log_softmax(-1)
    p = log_p.exp()
    return (p * (log_p - log_q)).sum(-1) + 0.5 * (p - log_q.exp()).abs().sum(-1)


LOSSES: dict[str, Loss] = {"kl": kl, "tvd": tvd, "mix": mix}


@torch.no_grad()
def acceptance(p_logits: Tensor, q_logits: Tensor) -> tuple[Tensor, Tensor]:
    """Chance that one draft token stands, [n] each: greedy (same likeliest token), and drawn at temperature 1."""
    return (p_logits.argmax(-1) == q_logits.argmax(-1)).float(), 1 - tvd(p_logits, q_logits)
