"""LoadedModel: a model ready to be run, which may not be in memory yet.

A runtime that keeps the weights in a form that it reads by itself needs neither the model's code nor a second copy of
its weights. Whoever does need them asks for `model`, and waits for it once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from outrider.models.files.skeleton import Skeleton


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a model on the CPU in float32 came from, and what is known of it without its code."""

    identity: str  # of the files and of the versions that read them; a digest
    kind: list[str]  # what decides the work of a forward
    parameters: int
    load: Callable[[], PreTrainedModel]
    skeleton: Callable[[], Skeleton | None]  # the model without its matrices, and the files where they lie


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode on its device. `fingerprint` names weights and shape, whatever the dtype."""

    # None where there is an origin: read when it is asked for, which takes seconds
    model: PreTrainedModel = field(repr=False)
    tokenizer: PreTrainedTokenizerBase | Any | None
    name: str
    eos_ids: frozenset[int]  # where `transformers`' own generate would stop
    fingerprint: str
    origin: Origin | None = None

    def __post_init__(self) -> None:
        if self.model is None:
            self.forget()

    def __getattr__(self, name: str) -> Any:
        """Changes state; called only for what is not there."""
        if name != "model" or self.origin is None:
            raise AttributeError(name)
        return self.__dict__.setdefault("model", self.origin.load())

    def forget(self) -> None:
        """Changes state: the memory of the model is given back where it can be read again."""
        if self.origin is not None:
            self.__dict__.pop("model", None)

    @property
    def in_memory(self) -> bool:
        return "model" in self.__dict__

    @property
    def device(self) -> torch.device:
        return self.model.device if self.in_memory else torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype if self.in_memory else torch.float32
