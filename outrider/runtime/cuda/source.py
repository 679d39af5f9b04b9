"""CUDA source: compiled while the program runs, by the compiler that comes with torch, and launched through the driver.

For kernels that need what Triton has no words for. Nothing is installed for it; where the compiler or the driver is not
to be found or refuses, `Unavailable` says why, and the caller does without.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_SHARED_BYTES = 8  # a function's attribute, as cuda.h counts them
_CLUSTER, _OVERLAP = 4, 6  # a launch's
_NUMBERS = {torch.float16: 6, torch.bfloat16: 9}
_INTERLEAVED, _LINES = 3, 2  # 128 bytes; asked for from memory in 128 bytes


class Unavailable(RuntimeError):
    """CUDA source cannot be compiled, loaded or launched here."""


@dataclass(frozen=True, slots=True)
class Function:
    handle: ctypes.c_void_p
    threads: int  # of a block
    shared: int  # bytes of shared memory


class TensorMap(ctypes.Structure):
    """How the copy engine finds a tile of a matrix (CUtensorMap)."""

    _fields_ = [("opaque", ctypes.c_uint64 * 16)]


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint32 * 16)]


class _Config(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    ]


def function(source: str, name: str, architecture: str, threads: int, shared: int) -> Function:
    """Compiles `source` and loads its function `name` on torch's current device."""
    code = compiled(source, architecture)
    module, handle = ctypes.c_void_p(), ctypes.c_void_p()
    torch.cuda.current_stream()  # the driver needs a context, which torch makes at its first call
    _check(_driver().cuModuleLoadData(ctypes.byref(module), code))
    _check(_driver().cuModuleGetFunction(ctypes.byref(handle), module, name.encode()))
    _check(_driver().cuFuncSetAttribute(handle, _SHARED_BYTES, shared))
    return Function(handle, threads, shared)


def launch(kernel: Function, blocks: int, cluster: int, arguments: Sequence[Any]) -> None:
    """On torch's current stream. `arguments`: C values. May come onto the chip before the last launch has ended."""
    attributes = (_Attribute * 2)()
    attributes[0].id, attributes[0].value[:3] = _CLUSTER, [cluster, 1, 1]
    attributes[1].id, attributes[1].value[0] = _OVERLAP, 1
    stream = torch.cuda.current_stream().cuda_stream
    config = _Config((blocks, 1, 1), (kernel.threads, 1, 1), kernel.shared, stream, attributes, len(attributes))
    pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
    _check(_driver().cuLaunchKernelEx(ctypes.byref(config), kernel.handle, pointers, None))


def tensor_map(matrix: Tensor, tile: tuple[int, int]) -> TensorMap:
    """Tiles of `matrix` as the matrix unit reads them, their rows of 128 bytes interleaved; outside of it is zero."""
    room = ctypes.create_string_buffer(ctypes.sizeof(TensorMap) + 64)
    made = TensorMap.from_buffer(room, -ctypes.addressof(room) % 64)  # the driver wants it on a line of 64 bytes
    (rows, columns), row_bytes = matrix.shape, matrix.stride(0) * matrix.element_size()
    _check(
        _driver().cuTensorMapEncodeTiled(
            ctypes.byref(made), _NUMBERS[matrix.dtype], 2, ctypes.c_void_p(matrix.data_ptr()),
            (ctypes.c_uint64 * 2)(columns, rows), (ctypes.c_uint64 * 1)(row_bytes),
            (ctypes.c_uint32 * 2)(tile[1], tile[0]), (ctypes.c_uint32 * 2)(1, 1), 0, _INTERLEAVED, _LINES, 0,
        )
    )  # fmt: skip
    return made


def compiled(source: str, architecture: str) -> bytes:
    compiler, program, size = _compiler(), ctypes.c_void_p(), ctypes.c_size_t()
    failed = compiler.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"source.cu", 0, None, None)
    options = [f"--gpu-architecture={architecture}".encode(), b"--std=c++17"]
    failed = failed or compiler.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    if failed:
        compiler.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        said = ctypes.create_string_buffer(size.value)
        compiler.nvrtcGetProgramLog(program, said)
        raise Unavailable(f"it does not compile: {said.value.decode()}")
    compiler.nvrtcGetCUBINSize(program, ctypes.byref(size))
    code = ctypes.create_string_buffer(size.value)
    compiler.nvrtcGetCUBIN(program, code)
    compiler.nvrtcDestroyProgram(ctypes.byref(program))
    return code.raw


@cache
def _compiler() -> ctypes.CDLL:
    """libnvrtc: where the loader finds it, or among the packages that torch was installed with."""
    major = (torch.version.cuda or "12").split(".")[0]
    name = f"libnvrtc.so.{major}"
    beside = [str(path) for folder in sys.path for path in sorted(Path(folder).glob(f"nvidia/*/lib/{name}"))]
    for place in (name, *beside):
        try:
            return ctypes.CDLL(place)
        except OSError:
            continue
    raise Unavailable(f"{name} is not to be found")


@cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise Unavailable("libcuda.so.1 is not to be found") from error


def _check(result: int) -> None:
    if result:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(result, ctypes.byref(text))
        raise Unavailable(f"the driver says: {(text.value or b'nothing').decode()}")
