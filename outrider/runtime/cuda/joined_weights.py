"""Joined weights: matrices that are given the same rows, below each other in one piece of memory.

The layers keep their weights, as parts of that piece: nothing is held twice, and names and values stay. One product of
many rows then takes the place of several, of which the small ones would leave most of the chip idle (256 rows of a
Llama of 8B shape: queries, keys and values 37 to 22 us). Needs room for one more copy of a single group at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

SMALL = 8192  # outputs: larger products fill the chip alone and are no faster together


class Joined(NamedTuple):
    weight: Tensor
    bias: Tensor | None


@torch.no_grad()
def join(layers: Sequence[nn.Linear]) -> Joined | None:
    """Changes where weights lie, once; None where one product would gain nothing."""
    if len(layers) < 2 or min(layer.out_features for layer in layers) >= SMALL:
        return None
    biases = [layer.bias for layer in layers if layer.bias is not None]
    if biases and len(biases) < len(layers):
        return None
    return Joined(_joined([layer.weight for layer in layers]), _joined(biases) if biases else None)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Parts of what this gives are what the parameters hold afterwards."""
    if (found := side_by_side(parts)) is not None:
        return found
    whole = torch.cat([part.data for part in parts])
    for part, stretch in zip(parts, whole.split([len(part) for part in parts]), strict=True):
        part.data = stretch
    return whole


def side_by_side(parts: Sequence[Tensor]) -> Tensor | None:
    """The one piece of memory that they are parts of; None where they do not follow each other."""
    if not _follow_each_other(parts):
        return None
    sizes = (sum(len(part) for part in parts), *parts[0].shape[1:])
    return parts[0].data.as_strided(sizes, parts[0].stride())


def _follow_each_other(parts: Sequence[Tensor]) -> bool:
    if len({part.untyped_storage().data_ptr() for part in parts}) > 1 or not all(p.is_contiguous() for p in parts):
        return False
    ends = [part.data_ptr() + part.nbytes for part in parts]
    return all(end == part.data_ptr() for end, part in zip(ends, parts[1:], strict=False))
