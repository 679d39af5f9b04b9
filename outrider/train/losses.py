"""How far a draft's next-token distribution q is from the target's p: the quantity that training lowers.

Rows of logits in, one number a row out; at least float32 throughout, since differences of small probabilities vanish in
half precision. Gradients reach q only. Divergences as in DistillSpec (arXiv 2310.08461), `tvdpp` arXiv 2403.00858.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Loss = Callable[[Tensor, Tensor], Tensor]  # target logits [n, vocabulary], draft logits [n, vocabulary] -> [n]


def _logs(p_logits: Tensor, q_logits: Tensor) -> tuple[Tensor, Tensor]:
    """log p, without a gradient, and log q."""
    return _log(p_logits.detach()), _log(q_logits)


def _log(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)


def _divergence(log_a: Tensor, log_b: Tensor) -> Tensor:
    return (log_a.exp() * (log_a - log_b)).sum(-1)


def kl(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """Forward Kullback-Leibler divergence, sum p log(p / q): every token the target may say must be likely."""
    log_p, log_q = _logs(p_logits, q_logits)
    return _divergence(log_p, log_q)


def rkl(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """Reverse Kullback-Leibler divergence, sum q log(q / p): no token the target would not say may be likely."""
    log_p, log_q = _logs(p_logits, q_logits)
    return _divergence(log_q, log_p)


def jsd(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """Jensen-Shannon divergence: the mean of both distributions' divergences from their mean; at most log 2."""
    log_p, log_q = _logs(p_logits, q_logits)
    log_m = torch.logaddexp(log_p, log_q) - math.log(2)
    return 0.5 * (_divergence(log_p, log_m) + _divergence(log_q, log_m))


def tvd(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """Total variation, half of sum |p - q|: one minus the chance that a drawn draft token is accepted."""
    log_p, log_q = _logs(p_logits, q_logits)
    return 0.5 * (log_p.exp() - log_q.exp()).abs().sum(-1)


def tvdpp(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """TVD++: the policy gradient of tvd with its reward r = 1[p > q] made an advantage, A = (r - mean) / deviation over
    the rows, weighted by q: -sum q A log q, q and A held fixed. Its value says little; its gradient is that of tvd,
    rescaled by how mixed the rewards are.
    """
    log_p, log_q = _logs(p_logits, q_logits)
    q = log_q.detach().exp()
    reward = (log_p > log_q.detach()).to(q.dtype)
    mean = (q * reward).sum(-1).mean()
    deviation = (q * (reward - mean).square()).sum(-1).mean().sqrt()
    return -(q * (reward - mean) / (deviation + 1e-6) * log_q).sum(-1)


def nla(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """Negative log acceptance, -log sum min(p, q): as tvd, but a row that is nearly always rejected weighs more."""
    log_p, log_q = _logs(p_logits, q_logits)
    return -torch.minimum(log_p, log_q).logsumexp(-1)


def ce(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """Cross-entropy with a hard label, the target's likeliest token: what greedy text asks for, and nothing else."""
    return -_log(q_logits).gather(-1, p_logits.argmax(-1, keepdim=True))[..., 0]


def topk_loss(p_logits: Tensor, q_logits: Tensor, count: int) -> Tensor:
    """-sum p log q over the target's `count` likeliest tokens, p not scaled up to one (HASS, arXiv 2408.15766)."""
    log_p, log_q = _logs(p_logits, q_logits)
    likeliest = log_p.topk(min(count, log_p.shape[-1]), dim=-1)
    return -(likeliest.values.exp() * log_q.gather(-1, likeliest.indices)).sum(-1)


def mix(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """kl + tvd: the first has a gradient where q is far off, the second is what is wanted in the end."""
    log_p, log_q = _logs(p_logits, q_logits)
    return _divergence(log_p, log_q) + 0.5 * (log_p.exp() - log_q.exp()).abs().sum(-1)


LOSSES: dict[str, Loss] = {
    "kl": kl, "rkl": rkl, "jsd": jsd, "tvd": tvd, "tvdpp": tvdpp, "nla": nla, "ce": ce, "mix": mix,
}  # fmt: skip


@torch.no_grad()
def acceptance(p_logits: Tensor, q_logits: Tensor) -> tuple[Tensor, Tensor]:
    """Chance that one draft token stands, [n] each: greedy (same likeliest token), and drawn at temperature 1."""
    return (p_logits.argmax(-1) == q_logits.argmax(-1)).float(), 1 - tvd(p_logits, q_logits)
