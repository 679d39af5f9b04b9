"""Short causal convolutions along each path: a row reads itself and its nearest ancestors, then the text before."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.activations import ACT2FN

from outrider.runtime.recurrent.ancestry import Ancestry


class Convolution:
    """One filter a channel. The state is the inputs of the last `width - 1` tokens, [B, width - 1, C]."""

    kept = 1

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: str | None) -> None:
        """`weight` is [C, width]."""
        self.weight, self.bias, self.activation = weight, bias, activation
        self.width = weight.shape[-1]

    def begin(self, rows: Sequence[Tensor]) -> Tensor:
        return rows[0].new_zeros((self.width - 1, rows[0].shape[-1]))

    def outputs(self, state: Tensor, rows: Sequence[Tensor], ancestry: Ancestry) -> Tensor:
        inputs = torch.cat([state, rows[0]], 1)  # [B, width - 1 + n, C]
        batch = torch.arange(len(inputs), device=inputs.device)[:, None, None]
        windows = inputs[batch, ancestry.taps(self.width)]  # [B, n, width, C]
        out = torch.einsum("bnwc,cw->bnc", windows.float(), self.weight.float())
        if self.bias is not None:
            out = out + self.bias.float()
        out = out.to(rows[0].dtype)  # rounded where torch's own convolution rounds
        return out if self.activation is None else ACT2FN[self.activation](out)

    def advance(self, state: Tensor, rows: Sequence[Tensor], counts: Tensor) -> Tensor:
        inputs = torch.cat([state, rows[0]], 1)
        places = counts[:, None] + torch.arange(self.width - 1, device=inputs.device)
        return inputs[torch.arange(len(inputs), device=inputs.device)[:, None], places]
