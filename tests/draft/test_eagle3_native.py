"""EAGLE-3's layer in compiled calls: the states and laws of torch's, in trees, on any number of threads."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from outrider.draft.eagle3 import LATE, Eagle3Source, Seat, _Block
from outrider.draft.eagle3_layer import Eagle3Layer, Eagle3Shape
from outrider.draft.eagle3_native import MOST, NativeLayer, made_for
from outrider.native.team import Team
from outrider.protocols import Scores, StepRecord, Verdict
from outrider.tree import from_paths, root

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


class Text:
    """As much of a context as a source reads."""

    def __init__(self, temperature: float = 0.0) -> None:
        self.temperature, self.tokens = temperature, np.arange(200)


def source(net: Eagle3Layer, threads: int = 0, temperature: float = 0.0, slots: int = 1) -> Eagle3Source:
    """With the same random past; on kernels of our own if it has threads."""
    torch.manual_seed(5)
    embed = torch.nn.Embedding(240, SHAPE.hidden).requires_grad_(False)
    made = Eagle3Source(net, embed, width=20, lone=(lambda own: made_for(own, Team(threads))) if threads else None)
    made.cache.reserve(slots, BASE)
    for part in made.cache.whole:
        part[:, :, :BASE] = torch.randn(slots, SHAPE.kv_heads, BASE, SHAPE.head_dim)
    for slot in range(slots):
        made._seats[slot] = Seat(Text(temperature), length=BASE + 1)
    return made


def tree_block(slot: int = 0) -> _Block:
    """A tree with siblings and cousins."""
    tree = from_paths(1, [[2, 3], [2, 4], [5, 6, 7]])
    torch.manual_seed(6)
    states = torch.randn(len(tree), SHAPE.hidden)
    return _Block(slot, BASE, BASE, BASE + tree.depths, tree.ancestor_mask(), tree.tokens.tolist(), states)


def differ(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


@torch.inference_mode()
def test_states_keys_and_laws_are_torchs_but_for_rounding(net: Eagle3Layer) -> None:
    torchs, ours = source(net), source(net, 1)
    assert isinstance(ours.lone, NativeLayer) and torchs.lone is None
    block = tree_block()
    (expected,), (got,) = torchs._forward([block]), ours._forward([block])
    assert 0 < differ(got, expected) < 0.02
    for mine, theirs in zip(ours.cache.whole, torchs.cache.whole, strict=True):
        assert differ(mine[0, :, : block.reach], theirs[0, :, : block.reach]) < 0.02
        assert differ(mine[0, :, BASE : block.reach], theirs[0, :, BASE : block.reach]) < 0.02
    features = torch.randn(5, 3 * SHAPE.hidden)
    assert differ(ours.lone.fuse(features), net.fuse(features)) < 0.02
    assert torch.equal(ours._forward([block])[0], got)


@torch.inference_mode()
def test_a_normed_state_flows_past_attention_where_the_shape_says_so(net: Eagle3Layer) -> None:
    normed, block = network(normed=True), tree_block()
    got = source(normed, 1)._forward([block])[0]
    assert differ(got, source(normed)._forward([block])[0]) < 0.02
    assert differ(got, source(net)._forward([block])[0]) > 0.1


@torch.inference_mode()
@pytest.mark.parametrize(("temperature", "rank"), [(0.0, 0), (0.5, 0), (1.7, 0), (0.0, 24)])
def test_laws_follow_the_temperature_and_stand_likeliest_first(temperature: float, rank: int) -> None:
    net = network(rank=rank)
    torchs, ours = source(net, 0, temperature), source(net, 1, temperature)
    states = torch.randn(4, SHAPE.hidden)
    ((*expected,),), ((*got,),) = torchs._laws([0], [states]), ours._laws([0], [states])
    for law, truth in zip(got, expected, strict=True):
        assert (np.diff(law.probs) <= 0).all() and law.probs.sum() <= 1 + 1e-6 and len(set(law.ids.tolist())) == 20
        wanted = dict(zip(truth.ids.tolist(), truth.probs.tolist(), strict=True))
        shared = [token for token in law.ids.tolist() if token in wanted]
        assert len(shared) >= 17
        for token in shared:
            assert law.prob(token) == pytest.approx(wanted[token], rel=0.15)


@torch.inference_mode()
def test_a_row_does_not_see_its_siblings(net: Eagle3Layer) -> None:
    """Nodes of one path alone have the states they have in the tree; a mask that lets everything through does not."""
    block, ours = tree_block(), source(net, 1)
    whole = ours._forward([block])[0]
    path = [0, 4, 5, 6]  # 1, 5, 6, 7
    alone = _Block(
        0, BASE, BASE, block.positions[path], np.tri(4, dtype=bool), [block.tokens[i] for i in path], block.states[path]
    )
    assert differ(source(net, 1)._forward([alone])[0], whole[path]) < 1e-3  # sums in another order
    blind = _Block(0, BASE, BASE, block.positions, np.tri(7, dtype=bool), block.tokens, block.states)
    assert differ(source(net, 1)._forward([blind])[0], whole) > 0.01


@torch.inference_mode()
def test_threads_change_no_bit(net: Eagle3Layer) -> None:
    found = []
    for threads in (1, 2, 3):
        ours = source(net, threads)
        states = ours._forward([tree_block()])[0]
        found.append((states, ours._laws([0], [states])[0]))
    for (a, laws), (b, others) in itertools.pairwise(found):
        assert torch.equal(a, b)
        for law, other in zip(laws, others, strict=True):
            assert np.array_equal(law.ids, other.ids) and np.array_equal(law.probs, other.probs)


@torch.inference_mode()
def test_batches_and_long_texts_are_torchs(net: Eagle3Layer) -> None:
    torchs, ours = source(net, slots=2), source(net, 1, slots=2)
    blocks = [tree_block(0), tree_block(1)]
    for got, expected in zip(ours._forward(blocks), torchs._forward(blocks), strict=True):
        assert torch.equal(got, expected)
    rows = MOST + 1
    long = _Block(0, BASE, BASE, BASE + np.arange(rows), np.tri(rows, dtype=bool), [1] * rows, torch.randn(rows, 48))
    assert torch.equal(ours._forward([long])[0], torchs._forward([long])[0])


def test_another_network_gets_a_layer_of_its_own_and_strange_ones_stay_with_torch(net: Eagle3Layer) -> None:
    ours = source(net, 1)
    before = ours.lone
    assert before is ours.lone
    ours.net = network(1)
    assert ours.lone is not before and ours.lone is not None
    assert made_for(network().double(), Team(1)) is None
    assert made_for(torch.nn.Linear(2, 2), Team(1)) is None
    assert made_for(Eagle3Layer(replace(SHAPE, head_dim=8), torch.arange(120)), Team(1)) is None


def test_after_a_long_sleep_the_newest_rows_are_read_at_their_own_positions(
    net: Eagle3Layer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, slept = source(net, 1), 30
    for _ in range(slept):
        scores = Scores(None, {layer: torch.randn(1, SHAPE.hidden) for layer in SHAPE.layers})
        ours.observe(0, StepRecord(root(1), Verdict((), 2), (2,), scores))
    ran: list[_Block] = []
    forward = ours._forward
    monkeypatch.setattr(ours, "_forward", lambda blocks: ran.extend(blocks) or forward(blocks))
    ours.start([0])
    ours.extend([0], [from_paths(1, [[2], [4]])], [1])
    text, tree = ran
    end = BASE + 1 + slept
    assert text.positions.tolist() == list(range(end - LATE, end)) and text.start == text.base == BASE + 1
    assert text.tokens == [position + 1 for position in text.positions]  # the text counts up
    assert tree.positions.tolist() == [end, end] and tree.start == BASE + 1 + LATE
