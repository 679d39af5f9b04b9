"""Which driver runs a trained layer, and on which kernels: the one place that puts them together."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from outrider.core.layer_driver import BlockDriver, LayerDriver, TextBlockDriver
from outrider.core.protocols import Target
from outrider.models.networks.block import DeerNet, DFlashNet
from outrider.models.networks.eagle3 import FeatureLayer
from outrider.runtime.cuda import reference
from outrider.runtime.layers.blocks import FeatureBlocks, TokenBlocks
from outrider.runtime.layers.cache import FeatureCache
from outrider.runtime.layers.plain import PlainDriver
from outrider.runtime.layers.plain import eight_bits as eight_bits
from outrider.runtime.layers.recorded import ROOM, Forward, Recording, fits
from outrider.runtime.layers.recorded_blocks import RecordedBlocks

log = logging.getLogger("outrider")


def layer_driver(net: FeatureLayer, embed: Callable[[Tensor], Tensor], *, beside: bool = False) -> LayerDriver:
    """The fastest for single sequences on the network's device, with a cache of its own; `embed` is the target's.

    `beside` a target with threads of its own it runs on the calling thread alone: theirs may still spin, and waking
    others for a millisecond of work costs more than it saves where cores are busy.
    """
    plain = PlainDriver(net, embed, packed=True)
    if plain.traits.device.type != "cpu":
        return plain
    from outrider.runtime.layers.native import made_for

    return made_for(plain, 1 if beside else torch.get_num_threads()) or plain


def block_driver(net: DFlashNet, embed: Callable[[Tensor], Tensor], target: Target | None) -> BlockDriver:
    """Of a network that fills blocks; `embed` is the target's. With a target it is recorded on CUDA, where there is
    memory for all that the target's slots can hold."""
    plain = FeatureBlocks(net, embed, eight_bits(net).active)
    if (
        target is None
        or plain.traits.device.type != "cuda"
        or find_spec("triton") is None
        or not _reserved(plain.cache, target)
    ):
        return plain
    ops, record = _recorder(plain.traits.device)
    return RecordedBlocks(plain, ops, active=nullcontext, record=record)


def text_block_driver(net: DeerNet, embed: Callable[[Tensor], Tensor]) -> TextBlockDriver:
    """Of a network that fills blocks and reads the text itself."""
    return TokenBlocks(net, embed, eight_bits(net).active)


@dataclass(slots=True)
class Drivers:
    """How one network is run, for all methods that draft with it: methods are made often, recording takes a while."""

    net: Any
    driver: LayerDriver
    roomy: bool | None = None  # whether there is memory for all that a target's slots can hold; None: not tried yet
    _recordings: dict[tuple[int, int], Recording] = field(default_factory=dict)

    def recorder(
        self, target: Target, *, beam: int, branch: int, depth: int
    ) -> Callable[[LayerDriver], Recording] | None:  # fmt: skip
        """Makes a driver's recording of such trees; the last one of each shape is kept.

        None where drafts are not recorded: off CUDA, for large trees, without memory for all that slots can hold.
        """
        if not isinstance(self.driver, PlainDriver) or self.driver.traits.device.type != "cuda":
            return None
        if find_spec("triton") is None or not fits(beam, branch, depth) or not self._has_room(target):
            return None

        def make(driver: LayerDriver) -> Recording:
            have = self._recordings.get((beam, branch))
            if have is None or have.driver is not driver:
                assert isinstance(driver, PlainDriver)
                have = self._recordings[beam, branch] = recording(driver, beam=beam, branch=branch)
            return have

        return make

    def _has_room(self, target: Target) -> bool:
        if self.roomy is None:
            assert isinstance(self.driver, PlainDriver)
            self.roomy = _reserved(self.driver.cache, target)
        return self.roomy


def _reserved(cache: FeatureCache, target: Target) -> bool:
    """Changes the cache: room for all that a target's slots can hold, so that it never moves; whether there is."""
    try:
        cache.reserve(target.traits.slots, target.max_context + ROOM)
    except torch.OutOfMemoryError:
        log.warning("drafts are not recorded but made step by step: too little GPU memory")
        return False
    return True


def recording(driver: PlainDriver, *, beam: int, branch: int) -> Recording:
    """On the kernels of the runtime that records whole steps; off CUDA it runs their reference, and anew each time."""
    device = driver.traits.device
    ops: Any = reference
    if device.type != "cuda":
        return Recording(driver, ops, beam=beam, branch=branch, active=driver.active, record=None)
    ops, record = _recorder(device)
    return Recording(driver, ops, beam=beam, branch=branch, active=fused(driver, ops), record=record)


def _recorder(device: torch.device) -> tuple[Any, Callable[[Forward], Forward]]:
    """The kernels of the runtime that records whole steps, and what records a forward with them."""
    from outrider.runtime.cuda.backend import kernels
    from outrider.runtime.cuda.same_bits.choice import ANY
    from outrider.runtime.cuda.step import recorded

    ops = SimpleNamespace(**vars(kernels(ANY)), Layout=reference.Layout)
    return ops, partial(recorded, device=device, pool=torch.cuda.graph_pool_handle())


def fused(driver: PlainDriver, ops: Any) -> Callable[[], AbstractContextManager[None]]:
    """What surrounds a forward of the layer so that norms, projections and gates share launches."""
    from outrider.runtime.cuda.fusion import Fusion

    net: Any = driver.net
    traits = driver.traits
    zeros = partial(torch.zeros, device=traits.device, dtype=traits.dtype)

    @torch.inference_mode()
    def probe() -> None:
        row = zeros((1, 2, traits.hidden))
        state = net.enter(row, net.fuse(zeros((1, 2, len(traits.layers) * traits.hidden))))
        query, _, _ = net.project(row, state, None)
        net.logits(net.finish(state, query))

    return Fusion(nn.ModuleList([net, *getattr(net, "shared", ())]), ops, probe).active
