"""HybridCache: what a model with recurrent layers takes for its cache while a pass runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache

from outrider.runtime.recurrent.recurrence import Recurrence
from outrider.runtime.recurrent.states import StateStore


class HybridCache(Cache):
    """Keys and values for some layers, states for others, maybe both for one.

    To a layer it says that there is no state yet: what the layer would do with one is done by its stand-ins, for which
    the cache remembers whose turn it is.
    """

    def __init__(self, attention: Cache, layers: dict[int, int] | None, states: StateStore) -> None:
        """`layers` are the places in `attention` of the model's layers, where they are not the same."""
        super().__init__(layers=[])
        self.attention, self.states = attention, states
        self._layers = layers
        self._layer = self._calls = 0  # whose recurrence runs next, and how many of its have run

    def run(self, recurrence: Recurrence, rows: Sequence[Tensor]) -> Tensor:
        """Changes state: outputs [B, R, ...] of a recurrence of the layer whose turn it is."""
        self._calls += 1
        return self.states.run((self._layer, self._calls), recurrence, rows)

    def turn(self, layer: int) -> None:
        """Changes state: the recurrences that run next are those of this layer."""
        self._layer, self._calls = layer, 0

    # What models ask

    def __len__(self) -> int:
        return len(self.attention)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **more: Any) -> Any:
        place = layer_idx if self._layers is None else self._layers[layer_idx]
        return self.attention.update(key_states, value_states, place, *args, **more)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return int(self.attention.get_seq_length(0))

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.attention.get_mask_sizes(query_length, 0)

    def has_previous_state(self, layer_idx: int | None = None) -> bool:
        """What layers ask that look for their states themselves."""
        if layer_idx is not None:
            self.turn(layer_idx)
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        self.turn(layer_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        self.turn(layer_idx)

    def update_conv_state(self, conv_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return conv_states

    def update_recurrent_state(self, recurrent_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return recurrent_states
