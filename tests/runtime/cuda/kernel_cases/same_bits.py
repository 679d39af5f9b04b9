"""A row has the same bits in any pass; `test_kernels.py` runs this file in a process of its own.

Without a GPU attention runs in Triton's interpreter, with products of our own: those
of numpy give a row other bits at another place of the matrix. Products are tried on the device alone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from tree_attention import error, problem, still_to_store, turned, words_of

from outrider.core.tree import fixed
from outrider.runtime.cuda import hopper_projection as wide
from outrider.runtime.cuda import reference
from outrider.runtime.cuda import tree_attention as free
from outrider.runtime.cuda.kernels import add_norm
from outrider.runtime.cuda.launch import hopper
from outrider.runtime.cuda.same_bits import attention as sb
from outrider.runtime.cuda.same_bits import cuts as order
from outrider.runtime.cuda.same_bits.products import Products

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
DTYPE, DIM, HEADS, GROUP = (torch.bfloat16, 128, 2, 4) if GPU else (torch.float32, 16, 1, 2)
CLOSE = 1e-2 if GPU else 1e-5
on_hopper = pytest.mark.skipif(not hopper(DEVICE), reason="needs a GPU of Hopper's generation")
few = settings(
    max_examples=10 if GPU else 2, suppress_health_check=list(HealthCheck), phases=[Phase.generate], deadline=None
)


class InOrder:
    """In place of numpy in Triton's interpreter: a matrix product that adds 16 products, then those to the sum."""

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    @staticmethod
    def matmul(a: Any, b: Any, dtype: Any) -> Any:
        out = np.zeros((a.shape[0], b.shape[1]), dtype)
        for begin in range(0, a.shape[1], 16):
            part = np.zeros_like(out)
            for k in range(begin, min(begin + 16, a.shape[1])):
                part += a[:, k, None].astype(dtype) * b[None, k].astype(dtype)
            out += part
        return out


@pytest.fixture(autouse=not GPU, scope="module")
def in_order() -> Iterator[None]:
    from triton.runtime import interpreter

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "np", InOrder())
        yield


class Text:
    """A text whose keys and values are known, and its rows' answers one by one."""

    def __init__(self, seed: int, tokens: int, **options: Any) -> None:
        g = torch.Generator().manual_seed(seed)
        made = [torch.randn(n, tokens + 40, DIM, generator=g).to(DEVICE, DTYPE) for n in (HEADS * GROUP, HEADS, HEADS)]
        self.query, self.key, self.value = made  # of each token that the text may have, or a candidate
        angle = torch.rand(tokens + 40, DIM // 2, generator=g).repeat(1, 2).to(DEVICE) * 6
        self.cos, self.sin = angle.cos().to(DTYPE), angle.sin().to(DTYPE)  # by position
        self.tokens, self.options = tokens, options

    def run(
        self, pieces: list[tuple[int, list[int], list[int]]], capacity: int, kernel: Any = sb.tree_attention, **how: Any
    ) -> list[torch.Tensor]:
        """Pieces: committed tokens, then the tokens in flight (which of the text's, or another) and their parents; a
        chain where there are none. What each row comes to."""
        count = len(pieces)
        keys = torch.full((count, HEADS, capacity, DIM), torch.nan, device=DEVICE, dtype=DTYPE)
        values = keys.clone()
        begins, positions, words, which = [0], [], [], []
        for i, (length, tokens, parents) in enumerate(pieces):
            tree = fixed(np.zeros(len(tokens), dtype=np.int64), np.array(parents))
            keys[i, :, :length] = self._rotated(self.key[:, :length], torch.arange(length, device=DEVICE))
            values[i, :, :length] = self.value[:, :length]
            begins.append(begins[-1] + len(tokens))
            positions.append(length + tree.depths)
            words.append(words_of(tree.ancestor_mask(), 2))
            which += tokens
        to = lambda x: torch.tensor(np.array(x), device=DEVICE)  # noqa: E731
        facts = [to(part) for part in zip(*((p[0], len(p[1])) for p in pieces), strict=True)]
        place = to(np.concatenate(positions))
        layout = reference.Layout(
            to(range(count)), *facts, to(begins), facts[1], to([0] * count), place, to(np.concatenate(words))
        )
        rows = lambda x: x[:, which][None].contiguous()  # noqa: E731
        out = kernel(
            rows(self.query), keys, values, layout, 0.3, fresh=reference.Fresh(rows(self.key), rows(self.value)),
            rotary=(self.cos[place][None], self.sin[place][None]), **self.options, **how,
        )[0]  # fmt: skip
        return list(out.split([len(p[1]) for p in pieces]))

    def _rotated(self, x: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        """As the kernel rotates: in float32, a product at a time."""
        cos, sin = self.cos[place].float(), self.sin[place].float()
        first, second = x.float().chunk(2, -1)
        return (x.float() * cos + torch.cat([-second, first], -1) * sin).to(DTYPE)


def tree_around(rng: np.random.Generator, path: list[int], others: int) -> tuple[list[int], list[int], list[int]]:
    """Tokens and parents of a tree that has this path, siblings stored between its nodes, and where the path stands."""
    tokens, parents, where = [path[0]], [-1], [0]
    for token in path[1:]:
        for _ in range(int(rng.integers(0, 4))):
            parents.append(int(rng.integers(0, len(tokens))))
            tokens.append(others + int(rng.integers(0, 40)))
        parents.append(where[-1])
        tokens.append(token)
        where.append(len(tokens) - 1)
    return tokens, parents, where


LENGTHS = [0, 3, 60, 126, 250, 700, 2040, 3000] if GPU else [3, 60, 125]


@few
@given(
    st.integers(0, 2**31), st.sampled_from(LENGTHS), st.integers(1, 24 if GPU else 6),
    st.sampled_from([None, 70, 20]), st.sampled_from([1, 2, 5]),
)  # fmt: skip
def test_a_row_in_any_tree_has_the_bits_that_it_has_alone(
    seed: int, length: int, depth: int, window: int | None, programs: int
) -> None:
    """Also where the path crosses a block or a cut, beside other sequences, and however the cuts are shared out."""
    rng = np.random.default_rng(seed)
    text = Text(seed % 1000, length + depth, window=window)
    capacity = length + depth + 140
    path = list(range(length, length + depth))
    tokens, parents, where = tree_around(rng, path, length + depth)
    want = torch.cat([text.run([(at, [at], [-1])], capacity)[0] for at in path])
    chain = text.run([(length, path, list(range(-1, depth - 1)))], capacity)[0]
    assert torch.equal(chain, want)
    some = int(rng.integers(0, length + 1))
    beside = (some, *tree_around(rng, path[: 1 + depth // 2], length + depth)[:2])
    found = text.run([beside, (length, tokens, parents), beside], capacity, programs=programs)[1][where]
    assert torch.equal(found, want)


def test_the_attention_is_that_of_the_reference() -> None:
    for seed, texts, window in ((2, 0.5, 20), *(((3, 0.5, None), (4, 0.0, 600)) if GPU else ())):
        size = (3, 40, 8, 4, 128, 3000) if GPU else (2, 6, 1, 2, 16, 90)
        query, keys, values, layout = problem(seed, *size, DTYPE, texts=texts)
        options: dict[str, Any] = {"window": window, "rotary": turned(layout, size[4], DTYPE)}
        options["fresh"] = still_to_store(keys, values, layout)
        copies = keys.clone(), values.clone()
        got = sb.tree_attention(query, *copies, layout, 0.1, **options)
        for kept in (keys, values):
            kept.nan_to_num_(0.0)
        assert error(got, reference.tree_attention(query, keys, values, layout, 0.1, **options)) < CLOSE
        for mine, theirs in zip(copies, (keys, values), strict=True):
            assert torch.allclose(mine.nan_to_num(0.0)[:, :, :-1], theirs[:, :, :-1], atol=5e-2 if GPU else 1e-5)


@pytest.mark.skipif(GPU, reason="compiled kernels refuse that their constants change")
def test_a_cut_that_moves_with_the_number_of_rows_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one would that gave every program as much of the context."""
    text = Text(5, 131)
    want = text.run([(130, [130], [-1])], 200)[0]
    monkeypatch.setattr(order, "_SHORT", free.tl.constexpr(64))
    monkeypatch.setattr(order, "SHORT", 64)
    moved = text.run([(130, [130], [-1])], 200, programs=3)[0]
    assert error(moved, want) < CLOSE and not torch.equal(moved, want)


def test_a_sibling_stored_between_two_ancestors_moves_bits_where_storage_is_the_order() -> None:
    """What this folder's attention is there for: the free one, with its cuts held fast, does not keep the bits."""
    text = Text(1, 54)
    path = list(range(40, 54))
    tokens, parents, where = tree_around(np.random.default_rng(1), path, 54)
    by_storage = partial(free.tree_attention, tiling=free.AttentionTiling(16, 1))
    chain = text.run([(40, path, list(range(-1, 13)))], 200, kernel=by_storage)[0]
    found = text.run([(40, tokens, parents)], 200, kernel=by_storage)[0][where]
    assert error(found, chain) < CLOSE and not torch.equal(found, chain)
    assert torch.equal(text.run([(40, tokens, parents)], 200)[0][where], torch.cat(
        [text.run([(at, [at], [-1])], 200)[0] for at in path]
    ))  # fmt: skip


# Products


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(DTYPE)


ROWS = (1, 2, 16, 17, 40, 64, 65, 100, 128, 129, 200, 256, 257, 300, 600)
SHAPES = ((4096, 4096), (4096, 14336), (6144, 4096), (576, 1536), (960, 576), (10000, 256), (152, 896))


@on_hopper
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_of_random_pieces_have_the_bits_of_the_row_alone(shape: tuple[int, int]) -> None:
    ops, (outputs, inputs) = Products(), shape
    x, rng = normal(1, 700, inputs), np.random.default_rng(1)
    weight, second = (normal(outputs, inputs) / inputs**0.5 for _ in range(2))
    norm, residual = normal(outputs), normal(1, 700, outputs)

    def every(rows: torch.Tensor, beside: torch.Tensor) -> list[torch.Tensor]:
        summed = ops.parts(rows, weight)
        assert summed is not None
        return [
            ops.project(rows, [weight]), ops.project(rows, [weight, second], gated=True),
            ops.project(rows, [weight, second]), *add_norm(beside, summed, norm, 1e-5),
        ]  # fmt: skip

    singles = [every(x[:, i : i + 1], residual[:, i : i + 1]) for i in range(3)]
    want = [torch.cat(parts, 1) for parts in zip(*singles, strict=True)]
    reals = F.linear(x.double(), weight.double())
    assert error(want[0], reals[:, :3]) < CLOSE
    for count in ROWS:
        chosen = rng.permutation(700)[:count]
        seats = rng.permutation(count)[: min(3, count)]
        chosen[seats] = np.arange(len(seats))
        for _ in range(2):  # a race would move bits
            got = every(x[:, chosen].contiguous(), residual[:, chosen].contiguous())
            assert error(got[0], reals[:, chosen]) < CLOSE
            for mine, theirs in zip(got, want, strict=True):
                assert torch.equal(mine[:, seats], theirs[:, : len(seats)])
    assert not ops.missed


@on_hopper
def test_a_part_more_for_many_rows_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    ops, x, weight = Products(), normal(1, 128, 4096), normal(4096, 4096) / 64
    summed = lambda rows: add_norm(torch.zeros_like(rows), ops.parts(rows, weight), normal(4096) * 0 + 1, 1e-5)[0]  # noqa: E731
    few_rows = summed(x[:, :3])
    assert torch.equal(summed(x)[:, :3], few_rows)
    count = wide.part_count(weight)
    monkeypatch.setattr(wide, "part_count", lambda weight: 2 * count)
    assert not torch.equal(summed(x)[:, :3], few_rows)


@on_hopper
def test_a_bias_is_added_to_the_rounded_product() -> None:
    ops, x, weights = Products(), normal(1, 90, 896), [normal(n, 896) / 30 for n in (896, 128, 128)]
    biases = [normal(len(w)) for w in weights]
    want = torch.cat([F.linear(x, w) + b for w, b in zip(weights, biases, strict=True)], -1)
    whole = ops.project(x, weights, biases=biases)
    assert error(whole, want) < CLOSE
    assert torch.equal(ops.project(x[:, 5:6], weights, biases=biases), whole[:, 5:6])
