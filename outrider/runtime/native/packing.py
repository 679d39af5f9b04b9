"""From a model's files to the weights that the native step reads, matrix by matrix, straight onto the disk.

Nothing is held in float32 but some rows of one matrix. What was packed is mapped and checked: the model runs with
it in the place of its matrices, and the step must say the same. Only then does it appear under its name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.progress import Progress
from torch import nn

from outrider.core.errors import UnsupportedModel
from outrider.models.convert import check_memory, check_space, kept
from outrider.models.files.phases import phase
from outrider.models.files.skeleton import Skeleton
from outrider.runtime.native import held
from outrider.runtime.native.backend import NativeBackend
from outrider.runtime.native.held import ARRAYS, Writer, mapped
from outrider.runtime.native.kernels.linear import pack
from outrider.runtime.native.kernels.screen import Screen, no_screen, screen_of
from outrider.runtime.native.kernels.step import Weights
from outrider.runtime.native.kernels.vectors import ROWS
from outrider.runtime.native.model import BITS, biases, held_of, norms, places, recognise, windows
from outrider.runtime.slots import SlotTarget
from outrider.runtime.support import refuse_unsupported

SOME = 512 * ROWS  # rows of a matrix that are packed together
PRODUCTS = ("qkv", "out", "gate", "up", "down", "head")


def pack_files(folder: Path, skeleton: Skeleton, precision: str, about: dict[str, Any]) -> None:
    """Changes the cache. Raises `UnsupportedModel` where the step does not run this model."""

    def fill(made: Path, _: Path, progress: Progress) -> str:
        check_space(made, _size(skeleton.model, BITS[precision]), f"packing {about['model']} for the runtime native")
        task = progress.add_task(f"packing {about['model']} in {precision}", total=_rows(skeleton.model))
        with phase("pack"), Writer(made / ARRAYS) as writer:
            _write(writer, skeleton, BITS[precision], progress, task)
        progress.update(task, description="checking the steps against the model", total=None)
        with phase("check"):
            finished = checked(skeleton.model, mapped(made / ARRAYS, writer.index), precision)
        held.write_facts(made, finished, writer.index, about)
        progress.remove_task(task)
        return str(about["model"])

    refuse_unsupported(skeleton.model)
    check_memory(_size(skeleton.model, BITS[precision]), f"{about['model']} in {precision}")
    kept(folder, fill)


def checked(model: Any, weights: Weights, precision: str) -> held.Held:
    """What a backend needs of a model that runs with these weights as its code says. Changes the model's embedding."""
    from outrider.runtime.native.model import as_held
    from outrider.runtime.probe import probe

    model.get_input_embeddings().weight = nn.Parameter(torch.from_numpy(weights.embedding), requires_grad=False)
    with as_held(model, weights):
        facts = probe(model)
    found = held_of(model, weights, recognise(model, facts), facts)
    SlotTarget(NativeBackend(model, precision=precision, held=found), max_slots=2, max_rows=8)
    rotary = held.usual_rotary(found.rotary, model.model.rotary_emb, found.limit[0])
    if rotary is None:
        raise UnsupportedModel(f"{type(model).__name__} has positions by a rule of its own")
    return held.with_rotary(found, rotary)


def _write(writer: Writer, skeleton: Skeleton, bits: int, progress: Progress, task: Any) -> None:
    model = skeleton.model
    layers = list(model.model.layers)
    attention, head = [layer.self_attn for layer in layers], model.lm_head
    writer.stream("embedding", np.float32, _matrix(skeleton, model.get_input_embeddings()))
    writer.add("before_attention", norms([layer.input_layernorm for layer in layers]))
    writer.add("before_mlp", norms([layer.post_attention_layernorm for layer in layers]))
    writer.add("last", norms([model.model.norm])[0])
    writer.add("query_norm", norms([getattr(a, "q_norm", None) for a in attention]))
    writer.add("key_norm", norms([getattr(a, "k_norm", None) for a in attention]))
    writer.add("windows", windows(model))
    screen = no_screen()
    if bits == 32 and head.bias is None:
        screen = screen_of(np.concatenate(list(_matrix(skeleton, head))))
    _add_screen(writer, screen)
    for name, of_layers in zip(PRODUCTS, places(model), strict=True):
        scales: list[list[NDArray[Any]]] = []

        def packed(of_layers: Sequence[Sequence[nn.Linear]] = of_layers, scales: Any = scales) -> Iterator[Any]:
            for modules in of_layers:
                scales.append([])
                for module in modules:
                    for rows in _matrix(skeleton, module):
                        part = pack(rows, bits)
                        scales[-1].append(part.scales)
                        yield part.values
                        progress.advance(task, len(rows))

        writer.stream(f"{name}.values", None, packed(), len(of_layers))
        writer.add(f"{name}.scales", np.stack([np.concatenate(of_layer) for of_layer in scales]))
        writer.add(f"{name}.bias", biases(of_layers))


def _add_screen(writer: Writer, screen: Screen) -> None:
    for field, array in screen.linear._asdict().items():
        writer.add(f"screen.linear.{field}", array)
    writer.add("screen.margins", screen.margins)


def _matrix(skeleton: Skeleton, module: nn.Module) -> Iterator[NDArray[np.float32]]:
    """Of a module, some rows at a time."""
    count = len(module.weight)  # type: ignore[arg-type]
    for low in range(0, count, SOME):
        yield skeleton.rows(module, low, min(low + SOME, count))


def _rows(model: Any) -> int:
    return sum(module.out_features for of_layers in places(model) for modules in of_layers for module in modules)


def _size(model: Any, bits: int) -> int:
    """Bytes on the disk, about."""
    weights = sum(m.weight.numel() for of_layers in places(model) for modules in of_layers for m in modules)
    return 4 * model.get_input_embeddings().weight.numel() + weights * (bits + bits % 8 + 1) // 8 + (1 << 20)
