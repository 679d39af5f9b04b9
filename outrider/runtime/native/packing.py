"""From a model's files to the weights that the native step reads, matrix by matrix, straight onto the disk.

Nothing is held in float32 but some rows of one matrix. What was packed is mapped and checked: the model runs with
it in the place of its matrices, and the step must say the same. Only then does it appear under its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.progress import Progress
from torch import nn

from outrider.core.errors import UnsupportedModel
from outrider.models.convert import check_memory, check_space, kept
from outrider.models.files.freed import give_back
from outrider.models.files.phases import phase
from outrider.models.files.skeleton import Skeleton
from outrider.models.known import parameters_of
from outrider.runtime.native import held
from outrider.runtime.native.backend import NativeBackend
from outrider.runtime.native.compiling import compiled_meanwhile
from outrider.runtime.native.held import ARRAYS, Writer, mapped
from outrider.runtime.native.kernels.linear import pack
from outrider.runtime.native.kernels.screen import screen_rows
from outrider.runtime.native.kernels.step import Weights
from outrider.runtime.native.kernels.vectors import ROWS
from outrider.runtime.native.model import BITS, biases, held_of, norms, places, recognise, table_bits, windows
from outrider.runtime.slots import SlotTarget
from outrider.runtime.support import refuse_unsupported

SOME = 1 << 19  # weights that are packed together
PRODUCTS = ("qkv", "out", "gate", "up", "down", "head")


def pack_files(folder: Path, skeleton: Skeleton, precision: str, about: dict[str, Any]) -> None:
    """Changes the cache. Raises `UnsupportedModel` where the step does not run this model."""

    def fill(made: Path, _: Path, progress: Progress) -> str:
        check_space(made, _size(skeleton.model, BITS[precision]), f"packing {about['model']} for the runtime native")
        task = progress.add_task(f"packing {about['model']} in {precision}", total=_rows(skeleton.model))
        with compiled_meanwhile(precision, parameters_of(skeleton.model)):
            with phase("pack"), Writer(made / ARRAYS) as writer:
                _write(writer, skeleton, BITS[precision], progress, task)
            give_back()
            progress.update(task, description="compiling the steps for this machine", total=None)
        progress.update(task, description="checking the steps against the model", total=None)
        with phase("check"):
            finished = checked(skeleton.model, mapped(made / ARRAYS, writer.index), precision)
        held.write_facts(made, finished, writer.index, about)
        give_back()
        progress.remove_task(task)
        return str(about["model"])

    refuse_unsupported(skeleton.model)
    check_memory(_size(skeleton.model, BITS[precision]), f"{about['model']} in {precision}")
    kept(folder, fill)


def checked(model: Any, weights: Weights, precision: str) -> held.Held:
    """What a backend needs of a model that runs with these weights as its code says. Changes the model's embedding."""
    from outrider.runtime.native.model import as_held
    from outrider.runtime.probe import probe

    embedding = model.get_input_embeddings()
    zeros = torch.zeros(()).expand(embedding.weight.shape)  # a model says by its first weight where it is
    embedding.weight = nn.Parameter(zeros, requires_grad=False)
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
    writer.add("before_attention", norms([layer.input_layernorm for layer in layers]))
    writer.add("before_mlp", norms([layer.post_attention_layernorm for layer in layers]))
    writer.add("last", norms([model.model.norm])[0])
    writer.add("query_norm", norms([getattr(a, "q_norm", None) for a in attention]))
    writer.add("key_norm", norms([getattr(a, "k_norm", None) for a in attention]))
    writer.add("windows", windows(model))
    _write_screen(writer, _matrix(skeleton, head) if bits == 32 and head.bias is None else None)
    advance = partial(progress.advance, task)
    for name, of_layers in zip(PRODUCTS, places(model), strict=True):
        _write_product(writer, name, skeleton, of_layers, table_bits(bits) if name == "head" else bits, advance)
        writer.add(f"{name}.bias", biases(of_layers))
    if skeleton.tied:
        writer.same("embedding.values", "head.values")
        writer.same("embedding.scales", "head.scales")
    else:
        _write_product(writer, "embedding", skeleton, [[model.get_input_embeddings()]], table_bits(bits))
    writer.add("embedding.bias", np.zeros((1, 0), np.float32))


def _write_product(
    writer: Writer, name: str, skeleton: Skeleton, of_layers: Sequence[Sequence[nn.Module]], bits: int,
    advance: Callable[[int], None] = lambda _: None,
) -> None:  # fmt: skip
    scales: list[list[NDArray[Any]]] = []

    def packed() -> Iterator[NDArray[Any]]:
        for modules in of_layers:
            scales.append([])
            for module in modules:
                for rows in _matrix(skeleton, module):
                    part = pack(rows, bits)
                    scales[-1].append(part.scales)
                    yield part.values
                    advance(len(rows))

    writer.stream(f"{name}.values", None, packed(), len(of_layers))
    writer.add(f"{name}.scales", np.stack([np.concatenate(of_layer) for of_layer in scales]))


def _write_screen(writer: Writer, head: Iterable[NDArray[np.float32]] | None) -> None:
    scales: list[NDArray[Any]] = []
    margins: list[NDArray[Any]] = []

    def values() -> Iterator[NDArray[Any]]:
        for rows in [np.zeros((1, 1), np.float32)] if head is None else head:
            part, *rest = screen_rows(rows)
            scales.append(rest[0])
            margins.append(rest[1])
            yield part

    writer.stream("screen.linear.values", None, values(), 1)
    writer.add("screen.linear.scales", np.concatenate(scales)[None])
    writer.add("screen.linear.bias", np.zeros((1, 0), np.float32))
    writer.add("screen.margins", margins[0][:0] if head is None else np.concatenate(margins))


def _matrix(skeleton: Skeleton, module: nn.Module) -> Iterator[NDArray[np.float32]]:
    """Of a module, some rows at a time."""
    count, columns = module.weight.shape  # type: ignore[misc, union-attr]
    some = max(SOME // columns // ROWS, 1) * ROWS
    for low in range(0, count, some):
        yield skeleton.rows(module, low, min(low + some, count))


def _rows(model: Any) -> int:
    return sum(module.out_features for of_layers in places(model) for modules in of_layers for module in modules)


def _size(model: Any, bits: int) -> int:
    """Bytes on the disk, about."""
    weights = sum(m.weight.numel() for of_layers in places(model)[:-1] for modules in of_layers for m in modules)
    table = model.get_input_embeddings().weight.numel()
    tables = table * (1 if model.config.tie_word_embeddings else 2) * table_bits(bits) // 8
    screen = table if bits == 32 else 0
    return tables + screen + weights * (bits + bits % 8 // 2) // 8 + (1 << 20)
