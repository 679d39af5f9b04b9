"""Packed linear layers for the CPU: weights laid out once in the form oneDNN multiplies best.

torch multiplies a few rows by a float32 matrix at one and a half to twice the cost of a single row; with packed weights
one to eight rows cost the same, and a single row less than before. Same function up to summation order. Costs as much
memory again as the weights, and is left out where that is not to be had.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

log = logging.getLogger(__name__)

ROWS = 8  # the number of rows the layout is chosen for
_packs: WeakIdKeyDictionary = WeakIdKeyDictionary()  # weight -> packed weight: models that share weights share packs


class PackedLinears:
    """Stands in for the forward of a model's linear layers while a pass runs; the model itself stays as it was."""

    def __init__(self, model: nn.Module) -> None:
        layers = [m for m in model.modules() if type(m) is nn.Linear and _packable(m)]
        weights = {id(m.weight): m.weight for m in layers}
        fresh = sum(w.nbytes for w in weights.values() if w not in _packs)
        if fresh > _available() // 2:
            log.info("linear layers stay unpacked: packing them takes %.1f GiB more memory", fresh / 2**30)
            layers = []
        self._forwards = [(m.__dict__, _forward(m)) for m in layers]

    @contextmanager
    def active(self) -> Iterator[None]:
        try:
            for attributes, forward in self._forwards:
                attributes["forward"] = forward
            yield
        finally:
            for attributes, _ in self._forwards:
                attributes.pop("forward", None)


def _packable(layer: nn.Linear) -> bool:
    weight = layer.weight
    plain = "forward" not in layer.__dict__ and not layer._forward_pre_hooks and type(weight) is nn.Parameter
    return plain and weight.device.type == "cpu" and weight.dtype == torch.float32 and _supported()


def _supported() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _forward(layer: nn.Linear) -> Callable[[Tensor], Tensor]:
    weight, bias = layer.weight, layer.bias
    if weight not in _packs:
        _packs[weight] = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS)
    packed, multiply = _packs[weight], torch.ops.mkldnn._linear_pointwise.default
    nothing: list[Any] = []

    def forward(x: Tensor) -> Tensor:
        return multiply(x, packed, bias, "none", nothing, "")

    return forward


def _available() -> int:
    """Bytes of memory that can still be taken; plenty where the system does not say."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return 1 << 62
