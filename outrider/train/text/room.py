"""The cache of a model that writes texts of a known length, a token at a time."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from outrider.runtime.recurrent.mixers import Mixers


def cache_of(model: PreTrainedModel, length: int) -> Cache:
    """An empty one for texts of so many tokens."""
    if Mixers(model):  # a recurrent layer has its own kind of place in a cache
        return DynamicCache(config=model.config)
    return Cache(layers=[_Room(length) for _ in range(model.config.get_text_config().num_hidden_layers)])


class _Room(DynamicLayer):
    """Keys and values of one layer in a buffer of the final size, so that growing copies nothing."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length
        self.used = 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            rows, heads, _, width = key_states.shape
            self._keys = key_states.new_empty(rows, heads, self.length, width)
            self._values = value_states.new_empty(rows, heads, self.length, value_states.shape[-1])
        end = self.used + key_states.shape[-2]
        self._keys[:, :, self.used : end] = key_states
        self._values[:, :, self.used : end] = value_states
        self.used = end
        self.keys, self.values = self._keys[:, :, :end], self._values[:, :, :end]
        return self.keys, self.values
