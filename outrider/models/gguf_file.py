"""The header of a GGUF file: how long the file must be, and how many values it holds.

Read before a conversion, so that a file that is not all there is called so, and the disk is known to have room. Follows
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; the values themselves are for `transformers` to read.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from outrider.core.errors import InputError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = "general.alignment", 32  # the key that says it, and what holds without
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TEXT, ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class Header:
    size: int  # bytes that the whole file has at least
    values: int  # in all tensors together
    architecture: str = ""
    tensors: dict[str, tuple[int, tuple[int, ...], int]] = field(default_factory=dict)  # place, shape, form of values
    facts: dict[str, Fact] = field(default_factory=dict)  # where they were asked for


@dataclass(frozen=True, slots=True)
class Fact:
    """One of the entries, a value or many, as `transformers` looks at it: texts are bytes, numbers tuples of one."""

    types: list[int]  # of the value; of an array that, and what it holds
    parts: list[Any]

    @property
    def data(self) -> range:
        return range(len(self.parts))


def read_header(path: Path, facts: bool = False) -> Header:
    """Raises `InputError` where there is none, or it is not complete. The facts hold all tokens of a vocabulary."""
    with path.open("rb") as file:
        if file.read(4) != MAGIC:
            raise InputError(f"{path} is no GGUF file: it does not begin with {MAGIC.decode()}; give another file")
        order = ">" if file.peek(1)[:1] == b"\0" else "<"  # the version, a small number, comes first
        try:
            return _read(file, order, facts)
        except (struct.error, MemoryError, OverflowError):
            raise InputError(f"{path} is incomplete: it ends within its header; download or copy it again") from None
        except (KeyError, ValueError) as error:
            raise InputError(f"{path} has a header of an unknown kind ({error}); convert it elsewhere") from None


def check_whole(path: Path) -> Header:
    """The header; raises `InputError` where the file is shorter than it says."""
    header, size = read_header(path), path.stat().st_size
    if size < header.size:
        raise InputError(
            f"{path} is incomplete: it has {size:,} bytes, and {header.size:,} by its header; download or copy it again"
        )
    return header


def _read(file: BinaryIO, order: str, wanted: bool) -> Header:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    def numbers(form: str) -> tuple[Any, ...]:
        form = order + form
        return struct.unpack(form, file.read(struct.calcsize(form)))

    def number(form: str) -> Any:
        return numbers(form)[0]

    version, tensors, facts = number("I"), number("Q"), number("Q")
    if version not in VERSIONS:
        raise KeyError(f"version {version}")
    alignment, architecture = ALIGNMENT[1], ""
    known: dict[str, Fact] = {}
    for _ in range(facts):
        name, kind = _text(file, number), number("I")
        fact = Fact([kind], [])
        value = _value(file, numbers, kind, fact if wanted else None)
        if wanted:
            known[name.decode()] = fact
        architecture = value.decode() if name == b"general.architecture" else architecture
        alignment = value if name == ALIGNMENT[0].encode() else alignment
    end = values = 0
    listed = {}
    for _ in range(tensors):
        named = _text(file, number).decode()
        shape = tuple(reversed([number("Q") for _ in range(number("I"))]))
        count, form = math.prod(shape), number("I")
        block, bytes_of_block = GGML_QUANT_SIZES[GGMLQuantizationType(form)]
        at = number("Q")
        end = max(end, at + count // block * bytes_of_block)
        values += count
        listed[named] = (at, shape, form)
    start = -(-file.tell() // alignment) * alignment
    placed = {named: (start + at, shape, form) for named, (at, shape, form) in listed.items()}
    return Header(start + end, values, architecture, placed, known)


def _text(file: BinaryIO, number: Callable[[str], Any]) -> bytes:
    size = number("Q")
    found = file.read(size)
    if len(found) < size:
        raise struct.error
    return found


def _value(file: BinaryIO, numbers: Callable[[str], tuple[Any, ...]], kind: int, fact: Fact | None) -> Any:
    """Changes the fact. Of an array, which may be a whole vocabulary, only its length; it is kept in a fact alone."""
    kept = [] if fact is None else fact.parts
    if kind == TEXT:
        kept.append(_text(file, lambda form: numbers(form)[0]))
        return kept[-1]
    if kind != ARRAY:
        kept.append(numbers(SCALARS[kind]))
        return kept[-1][0]
    inner, count = numbers("I")[0], numbers("Q")[0]
    if fact is not None:
        fact.types.append(inner)
    if inner not in SCALARS:
        for _ in range(count):
            _value(file, numbers, inner, fact)
    elif fact is None:
        file.seek(count * struct.calcsize("<" + SCALARS[inner]), 1)
    else:
        kept += [(value,) for value in numbers(f"{count}{SCALARS[inner]}")]
    return count
