"""The tensors of a model's files in float32, any rows of one at a time: never a whole model in memory.

Of safetensors files under their very names, and of GGUF files, whose blocks of quantised values are turned into numbers
here, under the names that `transformers` gives them. Only architectures whose parts are those of Llama.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.core.errors import InputError
from outrider.models.gguf_file import Header, read_header

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
INTERLEAVED = ("llama",)  # architectures whose files keep the halves of each rotary pair side by side
ARCHITECTURES = ("llama", "qwen2", "qwen3")
OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}  # fmt: skip
IN_LAYER = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
Floats = NDArray[np.float32]


class Tensors(Protocol):
    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """By the names of `transformers`."""
        ...

    def rows(self, name: str, low: int, high: int) -> Floats:
        """[high - low, ...]: of a vector its values."""
        ...


class Safetensors:
    """Of a model folder."""

    def __init__(self, folder: Path) -> None:
        from safetensors import safe_open

        index = folder / INDEX
        names = {SINGLE} if not index.is_file() else set(json.loads(index.read_text())["weight_map"].values())
        files = [safe_open(folder / name, "pt") for name in sorted(names)]
        self._slices: dict[str, Any] = {name: file.get_slice(name) for file in files for name in file.keys()}  # noqa: SIM118

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(part.get_shape()) for name, part in self._slices.items()}

    def rows(self, name: str, low: int, high: int) -> Floats:
        part: Floats = self._slices[name][low:high].float().numpy()
        return part


@dataclass(frozen=True, slots=True)
class _Stored:
    at: int
    shape: tuple[int, ...]
    kind: int
    heads: int = 0  # whose rows are interleaved; 0: none


class Gguf:
    """Of one file."""

    def __init__(self, path: Path, heads: int, kv_heads: int) -> None:
        header = read_header(path)
        refuse_other(path, header)
        self._path = path
        mixed = header.architecture in INTERLEAVED
        self._stored: dict[str, _Stored] = {}
        for name, (at, shape, kind) in header.tensors.items():
            if (meant := _name(name)) is not None:
                count = {"q_proj": heads, "k_proj": kv_heads}.get(meant.split(".")[-2], 0) if mixed else 0
                self._stored[meant] = _Stored(at, shape, kind, count)

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: stored.shape for name, stored in self._stored.items()}

    def rows(self, name: str, low: int, high: int) -> Floats:
        stored = self._stored[name]
        if not stored.heads:
            return self._read(stored, low, high)
        half = stored.shape[0] // stored.heads // 2  # row (head, half, i) of the model lies at (head, i, half)
        head, rest = np.divmod(np.arange(low, high), 2 * half)
        places = head * 2 * half + rest % half * 2 + rest // half
        first, last = int(places.min()), int(places.max()) + 1
        return np.ascontiguousarray(self._read(stored, first, last)[places - first])

    def _read(self, stored: _Stored, low: int, high: int) -> Floats:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
        from gguf.quants import dequantize

        kind = GGMLQuantizationType(stored.kind)
        block, size = GGML_QUANT_SIZES[kind]
        columns = stored.shape[-1] if len(stored.shape) > 1 else 1
        begin, end = low * columns, high * columns
        first = begin // block * block  # a vector's values may begin inside a block
        with self._path.open("rb") as file:
            file.seek(stored.at + first // block * size)
            raw = np.fromfile(file, np.uint8, -(-(end - first) // block) * size)
        if kind in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
            values = raw.view(np.float32 if kind == GGMLQuantizationType.F32 else np.float16).astype(np.float32)
        else:
            values = dequantize(raw.reshape(-1, size), kind).astype(np.float32).reshape(-1)
        values = values[begin - first : end - first]
        return values.reshape(high - low, columns) if len(stored.shape) > 1 else values


def refuse_other(path: Path, header: Header) -> None:
    if header.architecture not in ARCHITECTURES:
        raise InputError(f"{path.name} holds a model of the kind {header.architecture!r}, which is read as a whole")


def _name(stored: str) -> str | None:
    """None for what `transformers` works out by itself."""
    if stored in OUTSIDE:
        return OUTSIDE[stored]
    parts = stored.split(".")
    if len(parts) != 4 or parts[0] != "blk" or parts[2] not in IN_LAYER:
        return None if stored == "rope_freqs.weight" else stored
    return f"model.layers.{parts[1]}.{IN_LAYER[parts[2]]}.{parts[3]}"
