"""Whether the rows of a model have the same bits in any pass on this GPU: which kernels serve, and the proof by trial.

The kernels of this folder stand in for the free ones where the chip has them. That they cover the whole of a model is
tried when its runtime is first built: texts in shuffled pieces beside each other, and trees whose siblings stand
between ancestors, against the same tokens one by one. The verdict is kept in the user's cache, for this kind of model,
device and versions.
"""

from __future__ import annotations

import json
import logging
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.core.errors import InputError
from outrider.core.files import write_atomic
from outrider.core.protocols import Target
from outrider.core.records import Needs, Piece
from outrider.core.tree import TokenTree, fixed
from outrider.models.convert import cache_folder
from outrider.models.known import digest, kind_of
from outrider.models.quiet import first_line
from outrider.runtime.cuda.launch import hopper

log = logging.getLogger("outrider")
SAME, ANY = "same", "any"  # bits of a row in any pass; sums in the order that is fastest
ORDER = 1  # of the kernels; verdicts on another are not believed
TEXT = 330  # tokens of the trial's longest text: more rows than one launch of any kernel takes
DEPTH = 5  # of the path whose rows are compared
OUT = Needs(logits=True)


def ordered(ops: Any) -> Any:
    """Changes `ops`: where this chip has kernels of one order, they take the place of the free ones."""
    device = torch.device("cuda", torch.cuda.current_device())
    if not hopper(device):
        log.info("sums are in a free order: kernels of one order need a GPU of compute capability 9.0")
        return ops
    from outrider.runtime.cuda.hopper_product import compiles
    from outrider.runtime.cuda.same_bits.attention import fits, tree_attention
    from outrider.runtime.cuda.same_bits.products import Products

    if not compiles(device):
        return ops
    products, free = Products(), ops.tree_attention

    def attention(query: Tensor, keys: Tensor, *args: Any, **named: Any) -> Tensor:
        if fits(query, keys):
            return tree_attention(query, keys, *args, **named)
        products.missed.add(f"attention of {query.shape[1] // keys.shape[1]} heads that share keys")
        return free(query, keys, *args, **named)  # type: ignore[no-any-return]

    vars(ops).update(
        tree_attention=attention, streams=products.streams, project=products.project, parts=products.parts,
        missed=products.missed,
    )  # fmt: skip
    return ops


def has_same_bits(ops: Any, model: Any, target: Target) -> bool:
    """The verdict of the trial, or what is remembered of it."""
    missed = getattr(ops, "missed", None)
    if missed is None:
        return False
    if missed:
        log.info("sums are in a free order: no kernel of one order for %s", ", ".join(sorted(missed)))
        return False
    path = _path(model, target)
    try:
        return bool(json.loads(path.read_text(encoding="utf-8"))["same_bits"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    try:
        worst = largest_difference(target)
    except Exception as error:  # whatever a kernel says: the free ones have been checked by others
        log.warning("sums are in a free order: the kernels of one order fail here (%s)", first_line(error, typed=True))
        return False
    if worst:
        log.warning("rows have other bits in other passes (by up to %.1e of the largest logit): "
                    "near ties may part from plain decoding", worst)  # fmt: skip
    device = torch.cuda.get_device_name(target.device)
    verdict = {"same_bits": not worst, "model": type(model).__name__, "device": device}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(verdict))
    except (OSError, InputError) as error:
        log.info("the verdict on the rows' bits could not be stored: %s", error)
    return not worst


def _folder() -> Path:
    return cache_folder().parent / "runtimes"


def _path(model: Any, target: Target) -> Path:
    device = torch.cuda.get_device_name(target.device)
    identity = [kind_of(model), str(model.dtype), device, ORDER, torch.__version__, version("triton")]
    return _folder() / f"bits-{digest(identity)}.json"


# The trial


def largest_difference(target: Target, seed: int = 0) -> float:
    """As a share of the largest logit: how far rows of shuffled pieces are from the same rows one by one."""
    rng = np.random.default_rng(seed)
    depth = min(DEPTH, target.max_rows)
    length = min(TEXT, target.max_context - depth - 2)
    text = rng.integers(0, target.vocab_size, length + depth).tolist()
    want = _alone(target, text, length)
    found = [_in_pieces(target, text, length, rng, beside) for beside in (False, True)]
    most = float(want.abs().max())
    return max(float((rows - want).abs().max()) for rows in found) / most


def _alone(target: Target, text: list[int], length: int) -> Tensor:
    """The last rows of a text: its beginning in one pass, then token by token."""
    slot = target.acquire()
    try:
        rows = _logits(target, [Piece(slot, text[:length])], 0)
        return torch.cat([rows, *(_logits(target, [Piece(slot, [token])], 0) for token in text[length:])])
    finally:
        target.release(slot)


def _in_pieces(target: Target, text: list[int], length: int, rng: np.random.Generator, beside: bool) -> Tensor:
    """The same: the beginning in pieces, the rest as a tree among other trees, with neighbours in the same passes."""
    slots = [target.acquire() for _ in range(min(3 if beside else 1, target.free_slots))]
    rows, at, order = [], 0, rng.permutation
    try:
        while at < length:
            size = min(int(rng.choice([1, 2, 7, 40, 90, 200])), length - at)
            some = [Piece(slot, text[at : at + size]) for slot in slots]
            some[1:] = [Piece(p.slot, p.tokens[: 1 + int(rng.integers(len(p.tokens)))]) for p in some[1:]]
            mixed = [some[i] for i in order(len(some))]
            rows.append(_logits(target, mixed, mixed.index(some[0])))
            at += size
        trees = [_around(text[length:], rng, target.max_rows)[0] for _ in slots]
        tree, path = _around(text[length:], rng, target.max_rows)
        mixed = [Piece(slot, tree=one) for slot, one in zip(slots, [tree, *trees[1:]], strict=True)]
        chosen = order(len(mixed)).tolist()
        found = _logits(target, [mixed[i] for i in chosen], chosen.index(0))
        return torch.cat([*rows, found[path]])
    finally:
        for slot in slots:
            target.release(slot)


def _around(path: list[int], rng: np.random.Generator, most: int) -> tuple[TokenTree, list[int]]:
    """A tree that has this path, with nodes of other paths stored between its own, and where these stand."""
    tokens, parents, where = [path[0]], [-1], [0]
    for token in path[1:]:
        room = most - len(tokens) - (len(path) - len(where))
        for _ in range(min(int(rng.integers(1, 4)), max(0, room))):
            parents.append(int(rng.integers(0, len(tokens))))
            tokens.append(int(token) + 1 + len(tokens))
        parents.append(where[-1])
        tokens.append(token)
        where.append(len(tokens) - 1)
    bound = max(path) + 1
    return fixed(np.array([t if i in where else t % bound for i, t in enumerate(tokens)]), np.array(parents)), where


def _logits(target: Target, pieces: list[Piece], which: int) -> Tensor:
    logits = target.run(pieces, OUT)[which].logits
    assert logits is not None
    return logits.float()
