"""What the native step holds of a model: its weights in the form that the step reads, its sizes, its positions.

Kept on disk in the form that the step reads. Steps go through all weights, so they lie in huge pages where the system
has them: looking up small ones takes 4% of a step in float32. What is kept is known to be right: the check at load,
against the model itself, was passed before.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.models.convert import cache_folder, is_complete
from outrider.runtime.cache import LayerShape
from outrider.runtime.native.kernels.step import Sizes, Weights
from outrider.runtime.native.kernels.vectors import FLOATS, GROUP, HALVES, ROWS

FORMAT = 2  # raised when weights of an earlier form must be packed again
ARRAYS, FACTS = "weights.bin", "held.json"
ALIGNED = mmap.ALLOCATIONGRANULARITY
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
READ = 1 << 26  # bytes that are read together
PIECE = 512  # positions whose cosines and sines are worked out together


@dataclass(frozen=True, slots=True)
class Rotary:
    """Cosines and sines of positions by the usual rule."""

    frequencies: tuple[float, ...]  # of half a head, in float32
    scale: float

    def __call__(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """[P, D] each, to the last bit as `transformers` has them."""
        frequencies = torch.tensor(self.frequencies, dtype=torch.float32)[None, :, None]
        angles = (frequencies @ places[None, None].float()).transpose(1, 2)[0]
        both = torch.cat((angles, angles), dim=-1)
        return both.cos() * self.scale, both.sin() * self.scale


Angles = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Held:
    weights: Weights
    sizes: Sizes
    layers: int
    vocabulary: int
    inner: int  # width of the gated network
    limit: tuple[int, str]  # positions that the model may use, and why no more
    rotary: Angles

    @property
    def shapes(self) -> list[LayerShape]:
        sizes = self.sizes
        return [LayerShape(sizes.kv_heads, sizes.dim, sizes.dim, torch.float32, torch.device("cpu"))] * self.layers

    @property
    def hidden(self) -> int:
        """How many hidden states the model gives."""
        return self.layers + 1


def usual_rotary(angles: Angles, module: Any, limit: int) -> Rotary | None:
    """The rule of a model's rotary module, where the usual one gives the same bits at all positions; else None."""
    frequencies = getattr(module, "inv_freq", None)
    if not isinstance(frequencies, Tensor) or frequencies.dim() != 1:
        return None
    scale = float(getattr(module, "attention_scaling", 1.0))
    made = Rotary(tuple(map(float, frequencies)), scale)
    for low in range(0, limit, PIECE):
        places = torch.arange(low, min(low + PIECE, limit))
        if not all(torch.equal(mine, theirs) for mine, theirs in zip(made(places), angles(places), strict=True)):
            return None
    return made


def place(identity: str, precision: str) -> Path:
    """Where the weights of a model are kept in this precision, for this processor and these versions."""
    made_by = [FORMAT, HALVES, ROWS, GROUP, FLOATS, version("transformers"), version("torch")]
    return cache_folder().parent / "native" / f"{identity}-{precision}-{_digest(made_by)}"


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:8]


class Writer:
    """Writes arrays one behind the other, each at the beginning of a page; `index` says where. Changes the file."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self.index: dict[str, Any] = {}

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.write(b"\0" * ALIGNED)  # a mapping may reach behind the last one
        self._file.close()

    def add(self, name: str, array: NDArray[Any]) -> None:
        self.stream(name, array.dtype, [array])

    def same(self, name: str, other: str) -> None:
        """An array that is another one by a second name."""
        self.index[name] = self.index[other]

    def stream(self, name: str, kind: Any, parts: Iterable[NDArray[Any]], layers: int = 0) -> None:
        """An array in stretches of its first dimension; with `layers` in so many equal ones of a dimension more."""
        self._file.seek(-(-self._file.tell() // ALIGNED) * ALIGNED)
        at, count, shape = self._file.tell(), 0, []
        for part in parts:
            np.ascontiguousarray(part).tofile(self._file)
            count, shape, kind = count + len(part), list(part.shape[1:]), part.dtype
        whole = [layers, count // layers] if layers else [count]
        self.index[name] = {"at": at, "shape": [*whole, *shape], "kind": np.dtype(kind).str}


def write_facts(made: Path, held: Held, index: dict[str, Any], about: dict[str, Any]) -> None:
    """Changes the folder: all but the arrays. `about` is for those who look at what lies there."""
    assert isinstance(held.rotary, Rotary), "another rule is code, which is not kept"
    facts = {
        "sizes": held.sizes._asdict(), "layers": held.layers, "vocabulary": held.vocabulary, "inner": held.inner,
        "limit": list(held.limit), "rotary": asdict(held.rotary), "about": about, "arrays": index,
    }  # fmt: skip
    (made / FACTS).write_text(json.dumps(facts), encoding="utf-8")


def with_rotary(held: Held, rotary: Rotary) -> Held:
    return replace(held, rotary=rotary)


def mapped(path: Path, index: dict[str, Any]) -> Weights:
    """Private pages: nobody writes, but compiled code knows one type of arrays, which may be written."""
    whole = np.asarray(np.memmap(path, dtype=np.uint8, mode="c"))
    weights: Weights = _weights(Weights, "", index, whole)
    return weights


def resident(path: Path, index: dict[str, Any]) -> Weights:
    """The same in huge pages, read at once; mapped where the system has none."""
    if not hasattr(mmap, "MADV_HUGEPAGE") or "[never]" in _setting(HUGE_PAGES):
        return mapped(path, index)
    whole = mmap.mmap(-1, path.stat().st_size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole.madvise(mmap.MADV_HUGEPAGE)
    with path.open("rb", buffering=0) as file, memoryview(whole) as left:
        done = 0
        while done < len(left) and (some := file.readinto(left[done : done + READ])):
            done += some
    weights: Weights = _weights(Weights, "", index, np.frombuffer(whole, dtype=np.uint8))
    return weights


def _setting(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return "[never]"


def unread(array: Any) -> None:
    """Changes nothing but memory: pages of a file that an array is mapped to leave it until they are read again."""
    of_file = False
    while isinstance(array, np.ndarray):
        of_file, array = of_file or isinstance(array, np.memmap), array.base
    if of_file and isinstance(array, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        array.madvise(mmap.MADV_DONTNEED)


def read(folder: Path) -> Held | None:
    """What lies there; None where it is not complete."""
    if not is_complete(folder):
        return None
    try:
        facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
        rotary = facts["rotary"]
        return Held(
            resident(folder / ARRAYS, facts["arrays"]), Sizes(**facts["sizes"]), facts["layers"],
            facts["vocabulary"], facts["inner"], (int(facts["limit"][0]), str(facts["limit"][1])),
            Rotary(tuple(rotary["frequencies"]), rotary["scale"]),
        )  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _weights(kind: type[Any], name: str, index: dict[str, Any], mapped: NDArray[np.uint8]) -> Any:
    parts = []
    for field, inner in get_type_hints(kind).items():
        if isinstance(inner, type) and issubclass(inner, tuple):
            parts.append(_weights(inner, f"{name}{field}.", index, mapped))
            continue
        entry = index[f"{name}{field}"]
        dtype = np.dtype(entry["kind"])
        size = int(np.prod(entry["shape"])) * dtype.itemsize
        parts.append(mapped[entry["at"] : entry["at"] + size].view(dtype).reshape(entry["shape"]))
    return kind(*parts)
