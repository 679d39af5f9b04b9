"""Packed linear layers for the CPU: weights laid out once in the form oneDNN multiplies best.

torch multiplies a few rows by a float32 matrix at one and a half to twice the cost of a single row; with packed weights
one to eight rows cost the same, and a single row less than before. Same function up to summation order. In eight bits
they take a third of that again, for networks that only draft: activations are rounded too, to seven bits on processors
that would overflow with eight. Costs as much memory again as the weights (a quarter in eight bits), and is left out
where that is not to be had.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from outrider.runtime.replaced import Replacement, replaced
from outrider.runtime.weights import bits

log = logging.getLogger(__name__)

ROWS = 8  # the number of rows the layout is chosen for
_packs: WeakIdKeyDictionary = WeakIdKeyDictionary()  # weight -> its bits, packed: models that share weights share packs
_small_packs: WeakIdKeyDictionary = WeakIdKeyDictionary()  # the same in eight bits


class PackedLinears:
    """Stands in for the forward of a model's linear layers while a pass runs; the model itself stays as it was."""

    def __init__(self, model: nn.Module, *, eight_bits: bool = False) -> None:
        """`eight_bits` rounds weights and activations; where this torch cannot, they stay as they are."""
        small = eight_bits and _eight_bits_supported()
        layers = [m for m in model.modules() if type(m) is nn.Linear and _packable(m)]
        weights = {id(m.weight): m.weight for m in layers}
        fresh = sum(w.nbytes for w in weights.values() if w not in (_small_packs if small else _packs))
        if fresh > available() // 2:
            log.info("linear layers stay unpacked: packing them takes %.1f GiB more memory", fresh / 2**30)
            layers = []
        make = _small_forward if small else _forward
        self._forwards = [Replacement(layer.__dict__, "forward", make(layer)) for layer in layers]

    def active(self) -> AbstractContextManager[None]:
        return replaced(self._forwards)


def _packable(layer: nn.Linear) -> bool:
    weight = layer.weight
    plain = "forward" not in layer.__dict__ and not layer._forward_pre_hooks and type(weight) is nn.Parameter
    return plain and weight.device.type == "cpu" and weight.dtype == torch.float32 and _supported()


def _supported() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _forward(layer: nn.Linear) -> Callable[[Tensor], Tensor]:
    weight, bias = layer.weight, layer.bias
    packed = _pack(_packs, weight, lambda: torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS))
    multiply = torch.ops.mkldnn._linear_pointwise.default
    nothing: list[Any] = []

    def forward(x: Tensor) -> Tensor:
        return multiply(x, packed, bias, "none", nothing, "")

    return forward


def _pack(packs: WeakIdKeyDictionary, weight: Tensor, make: Callable[[], Any]) -> Any:
    """Changes `packs`: made once, and again where the weight was changed in place since."""
    now = bits(weight)
    if weight not in packs or packs[weight][0] != now:
        packs[weight] = now, make()
    return packs[weight][1]


def _eight_bits_supported() -> bool:
    return "fbgemm" in torch.backends.quantized.supported_engines and hasattr(torch.ops.quantized, "linear_dynamic")


def _small_forward(layer: nn.Linear) -> Callable[[Tensor], Tensor]:
    """Weights with a scale a row, activations with one for the whole call."""
    weight, bias = layer.weight, layer.bias
    packed = _pack(_small_packs, weight, lambda: _small(weight.detach(), bias))
    multiply, seven_bits = torch.ops.quantized.linear_dynamic.default, saturates()

    def forward(x: Tensor) -> Tensor:
        return multiply(x, packed, seven_bits)

    return forward


@cache
def saturates() -> bool:
    """Whether two products of eight bits are added in sixteen on this processor (one without VNNI): large ones do not
    fit there and come out far too small, unless activations are rounded to seven bits. False where it cannot be tried.
    """
    if not _eight_bits_supported():
        return False
    ones = torch.ones(1, 64)
    got = torch.ops.quantized.linear_dynamic(ones, _small(ones, None), False)
    return abs(float(got) - 64) > 1


def _small(weight: Tensor, bias: Tensor | None) -> Any:
    scales = (weight.abs().amax(1) / 127).clamp(min=1e-12)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch means to move these functions to another package
        whole = torch.quantize_per_channel(weight, scales, torch.zeros_like(scales).long(), 0, torch.qint8)
        return torch.ops.quantized.linear_prepack(whole, bias)


def available() -> int:
    """Bytes of memory that can still be taken; plenty where the system does not say."""
    found = []
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        found.append(int(lines["MemAvailable"].split()[0]) << 10)  # with what the system holds of files
    except (OSError, KeyError, ValueError):
        with suppress(AttributeError, OSError, ValueError):
            found.append(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    with suppress(OSError, ValueError):  # the bound of a container
        limit, used = (int(Path("/sys/fs/cgroup", name).read_text()) for name in ("memory.max", "memory.current"))
        found.append(max(0, limit - used))
    return min(found, default=1 << 62)
