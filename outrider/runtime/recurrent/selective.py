"""Recurrences whose decays differ by channel or state, so that a state is built for every row: level by level.

All rows at one depth of a tree take their step at once, each from its parent's state. In float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from outrider.runtime.recurrent.ancestry import Ancestry
from outrider.runtime.recurrent.recurrence import valid

Step = Callable[..., Tensor]  # states [M, ...] and what rows give, [M, ...] each -> the next states


def states_of_rows(state: Tensor, rows: Sequence[Tensor], ancestry: Ancestry, step: Step) -> Tensor:
    """[B, n + 1, ...]: the text's own state, then the state behind each row of a tree."""
    states = state.new_empty((len(state), ancestry.rows + 1, *state.shape[1:]))
    states[:, 0] = state
    for slot, row, parent in ancestry.levels:
        states[slot, row + 1] = step(states[slot, parent + 1], *(values[slot, row] for values in rows))
    return states


class SelectiveScan:
    """Mamba-1: h_t = exp(dt_t A) h_parent(t) + dt_t B_t x_t, y_t = h_t C_t. The state: [B, D, N].

    Rows: steps dt [B, n, D], inputs x [B, n, D], B [B, n, N], C [B, n, N].
    """

    kept = 3

    def __init__(self, rates: Tensor) -> None:
        """`rates` are A, [D, N]."""
        self.rates = rates.float()

    def begin(self, rows: Sequence[Tensor]) -> Tensor:
        return torch.zeros_like(self.rates)

    def outputs(self, state: Tensor, rows: Sequence[Tensor], ancestry: Ancestry) -> Tensor:
        *written, read = rows
        states = states_of_rows(state, [row.float() for row in written], ancestry, self._step)
        return (states[:, 1:].to(read.dtype) @ read[..., None])[..., 0]  # rounded where transformers rounds

    def advance(self, state: Tensor, rows: Sequence[Tensor], counts: Tensor) -> Tensor:
        steps, inputs, into = (row.float() for row in rows[:3])
        steps = steps * valid(counts, steps.shape[1])[..., None]  # a step of no time changes nothing
        for row in range(steps.shape[1]):
            state = self._step(state, steps[:, row], inputs[:, row], into[:, row])
        return state

    def _step(self, state: Tensor, steps: Tensor, inputs: Tensor, into: Tensor) -> Tensor:
        return torch.exp(steps[..., None] * self.rates) * state + (steps * inputs)[..., None] * into[:, None]


class GatedUnit:
    """RG-LRU of Griffin: h_t = a_t h_parent(t) + x_t, y_t = h_t. Rows: gates a [B, n, D], inputs x [B, n, D]."""

    kept = 2

    def begin(self, rows: Sequence[Tensor]) -> Tensor:
        return torch.zeros(rows[0].shape[2:], device=rows[0].device)

    def outputs(self, state: Tensor, rows: Sequence[Tensor], ancestry: Ancestry) -> Tensor:
        return states_of_rows(state, [row.float() for row in rows], ancestry, self._step)[:, 1:]

    def advance(self, state: Tensor, rows: Sequence[Tensor], counts: Tensor) -> Tensor:
        text = valid(counts, rows[0].shape[1])[..., None]
        gates, inputs = rows[0].float().masked_fill(~text, 1), rows[1].float() * text
        for row in range(gates.shape[1]):
            state = self._step(state, gates[:, row], inputs[:, row])
        return state

    def _step(self, state: Tensor, gates: Tensor, inputs: Tensor) -> Tensor:
        return gates * state + inputs


class WeightedMean:
    """RWKV-4: a mean of values, weighted by keys that decay, in which the row's own has an extra weight.

    Rows: keys [B, n, D], values [B, n, D]. The state, [B, 3, D]: the sum of weighted values, of weights, and the
    logarithm by which both are scaled, which means nothing before the first token.
    """

    kept = 2

    def __init__(self, decays: Tensor, first: Tensor) -> None:
        """`decays` are added to logarithms of weights at each token, `first` to the row's own; [D] each."""
        self.decays, self.first = decays, first

    def begin(self, rows: Sequence[Tensor]) -> Tensor:
        return torch.zeros((3, rows[0].shape[-1]), device=rows[0].device)

    def outputs(self, state: Tensor, rows: Sequence[Tensor], ancestry: Ancestry) -> Tensor:
        keys, values = (row.float() for row in rows)
        states = states_of_rows(state, [keys, values], ancestry, self._step)
        parents = torch.from_numpy(ancestry.parents + 1).to(states.device)
        before = states[torch.arange(len(states), device=states.device)[:, None], parents]
        read = self._add(before, keys + self.first, values, 0.0)
        return read[:, :, 0] / read[:, :, 1]

    def advance(self, state: Tensor, rows: Sequence[Tensor], counts: Tensor) -> Tensor:
        keys, values = (row.float() for row in rows[:2])
        text = valid(counts, keys.shape[1])
        for row in range(keys.shape[1]):
            state = torch.where(text[:, row, None, None], self._step(state, keys[:, row], values[:, row]), state)
        return state

    def _step(self, state: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return self._add(state, keys, values, self.decays)

    def _add(self, state: Tensor, keys: Tensor, values: Tensor, decays: Tensor | float) -> Tensor:
        """Of states [..., 3, D]: what was there decays, and a value comes in with the weight exp(key)."""
        total, weights, scale = state.unbind(-2)
        scale = torch.where(weights > 0, scale + decays, -torch.inf)
        top = torch.maximum(scale, keys)
        old, new = (scale - top).exp(), (keys - top).exp()
        return torch.stack([old * total + new * values, old * weights + new, top], -2)
