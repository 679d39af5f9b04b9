"""EAGLE-3's layer in compiled calls: the states and distributions of torch's, in trees, on any number of threads."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from outrider.core.layer_driver import LayerPiece
from outrider.core.records import Scores, StepRecord, Verdict
from outrider.core.tree import from_paths, root
from outrider.draft.feature.eagle3 import Eagle3Source
from outrider.draft.feature.text import Seat
from outrider.models.networks.eagle2 import Eagle2Layer
from outrider.models.networks.eagle3 import Eagle3Layer, Eagle3Shape
from outrider.runtime.layers.native import CATCHES_UP, NativeDriver, made_for
from outrider.runtime.layers.native_kernels import MAX_ROWS
from outrider.runtime.layers.plain import PlainDriver

SHAPE = Eagle3Shape(48, 6, 2, 16, 100, (0, 1, 2), 120)  # widths that fill no group
BASE = 37


def network(seed: int = 0, rank: int = 0, normed: bool = False) -> Eagle3Layer:
    torch.manual_seed(seed)
    net = Eagle3Layer(replace(SHAPE, rank=rank, normed=normed), torch.arange(0, 240, 2)).requires_grad_(False)
    for weight in net.parameters():
        torch.nn.init.normal_(weight, mean=0.0 if weight.ndim == 2 else 1.0, std=0.2)
    return net


@pytest.fixture(scope="module")
def net() -> Eagle3Layer:
    return network()


def plain_driver(net: Any) -> PlainDriver:
    torch.manual_seed(5)
    return PlainDriver(net, torch.nn.Embedding(240, SHAPE.hidden).requires_grad_(False))


def driver(net: Eagle3Layer, threads: int = 0, slots: int = 1) -> PlainDriver | NativeDriver:
    """With the same random past; on kernels of our own if it has threads."""
    plain = plain_driver(net)
    plain.cache.reserve(slots, BASE)
    for part in plain.cache.whole:
        part[:, :, :BASE] = torch.randn(slots, SHAPE.kv_heads, BASE, SHAPE.head_dim)
    if not threads:
        return plain
    native = made_for(plain, threads)
    assert native is not None
    return native


def whole(of: PlainDriver | NativeDriver) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values."""
    return (of.plain if isinstance(of, NativeDriver) else of).cache.whole


def tree_piece(slot: int = 0) -> LayerPiece:
    """A tree with siblings and cousins."""
    tree = from_paths(1, [[2, 3], [2, 4], [5, 6, 7]])
    torch.manual_seed(6)
    states = torch.randn(len(tree), SHAPE.hidden)
    return LayerPiece(slot, BASE, BASE, BASE + tree.depths, tree.ancestor_mask(), tree.tokens.tolist(), states)


def differ(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


@torch.inference_mode()
def test_states_keys_and_distributions_are_torchs_but_for_rounding(net: Eagle3Layer) -> None:
    torchs, ours = driver(net), driver(net, 1)
    piece = tree_piece()
    (expected,), (got,) = torchs.forward([piece]), ours.forward([piece])
    assert 0 < differ(got, expected) < 0.02
    for mine, theirs in zip(whole(ours), whole(torchs), strict=True):
        assert differ(mine[0, :, : piece.reach], theirs[0, :, : piece.reach]) < 0.02
        assert differ(mine[0, :, BASE : piece.reach], theirs[0, :, BASE : piece.reach]) < 0.02
    features = torch.randn(5, 3 * SHAPE.hidden)
    assert differ(ours.fuse(features), net.fuse(features)) < 0.02
    assert torch.equal(ours.forward([piece])[0], got)


@torch.inference_mode()
def test_a_normed_state_flows_past_attention_where_the_shape_says_so(net: Eagle3Layer) -> None:
    normed, piece = network(normed=True), tree_piece()
    got = driver(normed, 1).forward([piece])[0]
    assert differ(got, driver(normed).forward([piece])[0]) < 0.02
    assert differ(got, driver(net).forward([piece])[0]) > 0.1


@torch.inference_mode()
@pytest.mark.parametrize(("temperature", "rank"), [(0.0, 0), (0.5, 0), (1.7, 0), (0.0, 24)])
def test_distributions_follow_the_temperature_and_stand_likeliest_first(temperature: float, rank: int) -> None:
    net = network(rank=rank)
    asked = [torch.randn(4, SHAPE.hidden)], [temperature or 1.0], 20
    ((*expected,),), ((*got,),) = driver(net).distributions(*asked), driver(net, 1).distributions(*asked)
    for row, truth in zip(got, expected, strict=True):
        assert (np.diff(row.probs) <= 0).all() and row.probs.sum() <= 1 + 1e-6 and len(set(row.ids.tolist())) == 20
        wanted = dict(zip(truth.ids.tolist(), truth.probs.tolist(), strict=True))
        shared = [token for token in row.ids.tolist() if token in wanted]
        assert len(shared) >= 17
        for token in shared:
            assert row.prob(token) == pytest.approx(wanted[token], rel=0.15)


@torch.inference_mode()
def test_a_row_does_not_see_its_siblings(net: Eagle3Layer) -> None:
    """Nodes of one path alone have the states they have in the tree; a mask that lets everything through does not."""
    piece = tree_piece()
    states = driver(net, 1).forward([piece])[0]
    path = [0, 4, 5, 6]  # 1, 5, 6, 7
    alone = LayerPiece(
        0, BASE, BASE, piece.positions[path], np.tri(4, dtype=bool), [piece.tokens[i] for i in path], piece.states[path]
    )
    assert differ(driver(net, 1).forward([alone])[0], states[path]) < 1e-3  # sums in another order
    blind = LayerPiece(0, BASE, BASE, piece.positions, np.tri(7, dtype=bool), piece.tokens, piece.states)
    assert differ(driver(net, 1).forward([blind])[0], states) > 0.01


@torch.inference_mode()
def test_a_wrong_position_is_seen(net: Eagle3Layer) -> None:
    """What every comparison of drivers rests on: the same rows one place further on have other states."""
    piece = tree_piece()
    moved = replace(piece, positions=piece.positions + 1)
    for threads in (0, 1):
        right, wrong = (driver(net, threads).forward([rows])[0] for rows in (piece, moved))
        assert differ(wrong, right) > 0.03


@torch.inference_mode()
def test_threads_change_no_bit(net: Eagle3Layer) -> None:
    found = []
    for threads in (1, 2, 3):
        ours = driver(net, threads)
        states = ours.forward([tree_piece()])
        found.append((states[0], ours.distributions(states, [1.0], 20)[0]))
    for (a, rows), (b, others) in itertools.pairwise(found):
        assert torch.equal(a, b)
        for row, other in zip(rows, others, strict=True):
            assert np.array_equal(row.ids, other.ids) and np.array_equal(row.probs, other.probs)


@torch.inference_mode()
def test_batches_and_long_texts_are_torchs(net: Eagle3Layer) -> None:
    torchs, ours = driver(net, slots=2), driver(net, 1, slots=2)
    pieces = [tree_piece(0), tree_piece(1)]
    for got, expected in zip(ours.forward(pieces), torchs.forward(pieces), strict=True):
        assert torch.equal(got, expected)
    rows = MAX_ROWS + 1
    sees, states = np.tri(rows, dtype=bool), torch.randn(rows, SHAPE.hidden)
    long = LayerPiece(0, BASE, BASE, BASE + np.arange(rows), sees, [1] * rows, states)
    assert torch.equal(ours.forward([long])[0], torchs.forward([long])[0])


def test_another_network_gets_a_driver_on_the_same_cache_and_strange_ones_stay_with_torch(net: Eagle3Layer) -> None:
    ours = driver(net, 1)
    other = ours.renewed(network(1))
    assert isinstance(other, NativeDriver) and other.net is not net
    assert whole(other)[0] is whole(ours)[0]
    assert made_for(plain_driver(network().double()), 1) is None
    assert made_for(plain_driver(Eagle3Layer(replace(SHAPE, head_dim=8), torch.arange(120))), 1) is None
    like = Eagle2Layer(SHAPE, torch.arange(120), torch.nn.Linear(SHAPE.hidden, 120))
    assert made_for(plain_driver(like), 1) is None


class Text:
    """As much of a context as a source reads."""

    temperature, tokens = 0.0, np.arange(BASE + 2)


def test_after_a_long_sleep_the_newest_rows_are_read_at_their_own_positions(
    net: Eagle3Layer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, slept = driver(net, 1), 30
    source: Any = Eagle3Source(ours, width=20)
    text = Text()
    source._seats[0] = Seat(text, length=BASE + 1)  # type: ignore[arg-type]
    for _ in range(slept):
        text.tokens = np.arange(len(text.tokens) + 1)
        scores = Scores(None, {layer: torch.randn(1, SHAPE.hidden) for layer in SHAPE.layers})
        source.observe([0], [StepRecord(root(1), Verdict((), 2), (2,), scores)])
    ran: list[LayerPiece] = []
    forward = ours.forward
    monkeypatch.setattr(ours, "forward", lambda pieces: ran.extend(pieces) or forward(pieces))
    source.start([0])
    source.extend([0], [from_paths(1, [[2], [4]])], [1])
    newest, tree = ran
    end = BASE + 1 + slept
    assert newest.positions.tolist() == list(range(end - CATCHES_UP, end)) and newest.start == newest.base == BASE + 1
    assert newest.tokens == [position + 1 for position in newest.positions]  # the text counts up
    assert tree.positions.tolist() == [end, end] and tree.start == BASE + 1 + CATCHES_UP
