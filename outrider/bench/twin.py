"""A GGUF file with its weights in float32 or eight bits: as many as ours have, for runtimes that read GGUF only.

Float32 are the very values; in eight bits each block of 32 has a scale. Everything but the weights' type is copied. The
price is disk: four bytes or one a parameter, once, in the user's cache.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from platformdirs import user_cache_path

from outrider.core.errors import MissingExtra
from outrider.models.convert import folder_for

FILE_TYPE = "general.file_type"
BLOCK = 32  # values that share a scale in eight bits

Kind = Literal["f32", "q8"]


def twin_gguf(path: Path, kind: Kind, folder: Path | None = None) -> Path:
    """`path` with its weights in another kind, made on first use. Changes the user's cache."""
    if find_spec("gguf") is None:
        raise MissingExtra("converting a GGUF file needs the package gguf; run: pip install 'outrider[demo]'")
    folder = folder or user_cache_path("outrider") / "bench"
    out = folder / f"{folder_for(path)}-{kind}.gguf"
    if not out.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        scratch = out.with_suffix(f".{os.getpid()}.partial")
        try:
            _write(path, scratch, kind)
            os.replace(scratch, out)
        finally:
            scratch.unlink(missing_ok=True)
    return out


def _write(path: Path, out: Path, kind: Kind) -> None:
    from gguf import GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType, quants

    reader = GGUFReader(path)
    writer = GGUFWriter(out, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", FILE_TYPE):
            continue
        inner = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], inner)
    writer.add_uint32(FILE_TYPE, LlamaFileType.ALL_F32 if kind == "f32" else LlamaFileType.MOSTLY_Q8_0)
    for tensor in reader.tensors:
        values = quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        _add(writer, tensor.name, values.reshape(*reversed(tensor.shape.tolist())), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: Any, name: str, values: NDArray[np.float32], kind: Kind) -> None:
    """Matrices in the kind asked for; norms, and rows that do not divide into blocks, always in float32."""
    from gguf import GGMLQuantizationType, quants

    if kind == "q8" and values.ndim > 1 and values.shape[-1] % BLOCK == 0:
        packed = quants.quantize(values, GGMLQuantizationType.Q8_0)
        writer.add_tensor(name, packed, raw_dtype=GGMLQuantizationType.Q8_0)
    else:
        writer.add_tensor(name, values)
