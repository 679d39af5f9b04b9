"""A GGUF file with its weights dequantised to float32: the same values as ours, for runtimes that read GGUF only.

Everything but the weights' type is copied. The price is disk: four bytes a parameter, once, in the user's cache.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from platformdirs import user_cache_path

from outrider.errors import MissingExtra
from outrider.models.convert import folder_for

FILE_TYPE = "general.file_type"


def dense_gguf(path: Path, folder: Path | None = None) -> Path:
    """The dequantised twin of `path`, made on first use. Changes the user's cache."""
    if find_spec("gguf") is None:
        raise MissingExtra("dequantising a GGUF file needs the package gguf; run: pip install 'outrider[demo]'")
    folder = folder or user_cache_path("outrider") / "bench"
    out = folder / f"{folder_for(path)}-f32.gguf"
    if not out.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        scratch = out.with_suffix(f".{os.getpid()}.partial")
        try:
            _write(path, scratch)
            os.replace(scratch, out)
        finally:
            scratch.unlink(missing_ok=True)
    return out


def _write(path: Path, out: Path) -> None:
    from gguf import GGUFReader, GGUFValueType, GGUFWriter, quants

    reader = GGUFReader(path)
    writer = GGUFWriter(out, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", FILE_TYPE):
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind == GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, inner)
    writer.add_uint32(FILE_TYPE, 0)  # float32 throughout
    for tensor in reader.tensors:
        values = quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        writer.add_tensor(tensor.name, values.reshape(*reversed(tensor.shape.tolist())))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
