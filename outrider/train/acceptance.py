"""What a draft model would reach, from one forward over finished text: exact for chains, without decoding.

Along text x that the target wrote, a draft token at position i stands with chance r_i: greedy, 1 where both models
prefer the same token; drawn at temperature 1, min(1, q(x_i) / p(x_i)), for with x_i ~ p the pair (x_i, stands?) is
distributed as under token-level rejection. A step takes tokens until one falls or the depth is reached, and one
token more.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

Rates = NDArray[np.float64]


@torch.no_grad()
def rows_over(model: PreTrainedModel, tokens: Tensor, start: int) -> Tensor:
    """The model's logits for tokens[start:] of one text, [len(tokens) - start, vocabulary]; start >= 1."""
    return model(tokens[None].to(model.device), use_cache=False).logits[0, start - 1 : -1].float()


def stand_rates(p_logits: Tensor, q_logits: Tensor, said: Tensor) -> tuple[Rates, Rates]:
    """r_i for the tokens `said`, from both models' rows: (greedy, drawn)."""
    greedy = (p_logits.argmax(-1) == q_logits.argmax(-1)).double()
    gap = _log_chance(q_logits, said) - _log_chance(p_logits, said)
    return greedy.cpu().numpy(), gap.double().exp().clamp(max=1).cpu().numpy()


def _log_chance(logits: Tensor, tokens: Tensor) -> Tensor:
    return logits.gather(-1, tokens[:, None])[:, 0] - logits.logsumexp(-1)


def accepted_length(rates: Sequence[Rates], depth: int) -> float:
    """Tokens emitted a target step with a chain of `depth`, over all texts; 1.0 where nothing is ever accepted."""
    tokens = sum(len(r) for r in rates)
    return tokens / max(sum(_expected_steps(r, depth) for r in rates), 1.0)


def _expected_steps(rates: Rates, depth: int) -> float:
    """Steps to write the whole text: steps[i] = 1 + sum_k chance(exactly k stand from i) steps[i + k + 1]."""
    total = len(rates)
    steps = np.zeros(total + depth + 2)
    for i in range(total - 1, -1, -1):
        reach, expected = 1.0, 1.0
        for k in range(depth):
            rate = rates[i + k] if i + k < total else 0.0
            expected += reach * (1 - rate) * steps[i + k + 1]
            reach *= rate
            if reach == 0.0:
                break
        else:
            expected += reach * steps[i + depth + 1]
        steps[i] = expected
    return float(steps[0])
