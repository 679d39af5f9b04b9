"""The selective scan of Mamba-1: every channel and state decays by itself, so a state is built for every row.

    h_t = exp(dt_t A) h_parent(t) + dt_t B_t x_t        y_t = h_t C_t

Level by level over the depth of a tree, all rows of a level at once. In float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.runtime.recurrent.ancestry import Ancestry
from outrider.runtime.recurrent.recurrence import valid


class SelectiveScan:
    """Rows: steps dt [B, n, D], inputs x [B, n, D], B [B, n, N], C [B, n, N]. The state: [B, D, N]."""

    kept = 3

    def __init__(self, rates: Tensor) -> None:
        """`rates` are A, [D, N]."""
        self.rates = rates.float()

    def begin(self, rows: Sequence[Tensor]) -> Tensor:
        return torch.zeros_like(self.rates)

    def outputs(self, state: Tensor, rows: Sequence[Tensor], ancestry: Ancestry) -> Tensor:
        steps, inputs, into, out_of = (row.float() for row in rows)
        states = state.new_empty((len(state), ancestry.rows + 1, *state.shape[1:]))  # the text's own comes first
        states[:, 0] = state
        for slot, row, parent in ancestry.levels:
            step, key = steps[slot, row], into[slot, row]
            states[slot, row + 1] = self._next(states[slot, parent + 1], step, inputs[slot, row], key)
        return torch.einsum("btdn,btn->btd", states[:, 1:], out_of)

    def advance(self, state: Tensor, rows: Sequence[Tensor], counts: Tensor) -> Tensor:
        steps, inputs, into = (row.float() for row in rows[:3])
        steps = steps * valid(counts, steps.shape[1])[..., None]  # a step of no time changes nothing
        for row in range(steps.shape[1]):
            state = self._next(state, steps[:, row], inputs[:, row], into[:, row])
        return state

    def _next(self, state: Tensor, step: Tensor, inputs: Tensor, into: Tensor) -> Tensor:
        """One token on, in any number of states: [M, D, N]."""
        return torch.exp(step[..., None] * self.rates) * state + (step * inputs)[..., None] * into[:, None]
