"""What a kind of recurrence must be able to do, whoever keeps its states.

Rows are what a layer's projections give for each token: they are computed for all rows of a pass at once. A recurrence
carries a state from row to row. It is never asked to change one in place: a tree begins at the same state many times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from outrider.runtime.recurrent.ancestry import Ancestry


class Recurrence(Protocol):
    """`rows` are tensors [B, n, ...]; `state` is [B, ...]. Holds the parameters of its layer."""

    @property
    def kept(self) -> int: ...  # of the tensors of rows, the first so many are enough to advance a state
    def begin(self, rows: Sequence[Tensor]) -> Tensor:
        """The state before the first token of a text, of one slot."""
        ...

    def outputs(self, state: Tensor, rows: Sequence[Tensor], ancestry: Ancestry) -> Tensor:
        """[B, n, ...]: what the layer reads at each row, from the state that the row's own path has left."""
        ...

    def advance(self, state: Tensor, rows: Sequence[Tensor], counts: Tensor) -> Tensor:
        """The state behind the first `counts[b]` of these rows, which are a stretch of text."""
        ...


def valid(counts: Tensor, rows: int) -> Tensor:
    """[B, n]: whether a row is among the first `counts[b]`."""
    return torch.arange(rows, device=counts.device)[None] < counts[:, None]
