"""States that are taken up again: prefixes found, forks, cuts, trees that grow, and a cache too small for what runs."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.core.errors import InputError, UnsupportedModel
from outrider.core.records import Needs, Piece
from outrider.core.tree import TokenTree, chain, fixed
from outrider.runtime import choice
from outrider.runtime.eager.hybrid import HybridSlots
from outrider.runtime.recurrent import mixers
from outrider.runtime.recurrent.snapshots import PER_TEXT, Snapshots
from outrider.runtime.slots import SlotTarget
from outrider.runtime.targets import cuda_target, eager_target
from tests.runtime.recurrent.families import build, unchecked
from tests.runtime.running import run_text, run_trees, shorter_prefixes

NAMES = ["mamba2", "lfm2", "qwen3-next", "mamba"]
TEXT = [n * 7 % 61 for n in range(3, 33)]
TREE = fixed(np.array([8, 3, 4, 12, 50, 22, 7]), np.array([-1, 0, 0, 1, 2, 2, 4]))


def plain(name: str, text: list[int]) -> Tensor:
    with torch.no_grad():
        logits: Tensor = build(name)(torch.tensor([text]), use_cache=False).logits[0]
    return logits


def at(target: SlotTarget, slot: int, token: int) -> Tensor:
    """Logits of a tree of two rows behind what the slot holds."""
    (scores,) = run_trees(target, [slot], [chain(token, [9])])
    assert scores.logits is not None
    return scores.logits


def right(name: str, target: SlotTarget, slot: int, text: list[int]) -> bool:
    want = plain(name, [*text, 8, 9])[-2:]
    return target.length(slot) == len(text) and bool((at(target, slot, 8) - want).abs().max() < 1e-4)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_prompts_in_any_pieces_give_the_same(name: str, chunk: int) -> None:
    target = unchecked(build(name), max_slots=2, prompt_rows=chunk)
    slots = [target.acquire(), target.acquire()]
    rows = [[], []]
    for step in run_text(target, slots, [[*TEXT, 0], [*TEXT[:7], 0]], Needs(logits=True)):
        for one in step:
            rows[slots.index(one.slot)].append(one.scores.logits)
    assert (torch.cat(rows[0]) - plain(name, TEXT)).abs().max() < 1e-4
    assert (torch.cat(rows[1]) - plain(name, TEXT[:7])).abs().max() < 1e-4
    assert right(name, target, slots[0], TEXT) and right(name, target, slots[1], TEXT[:7])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("length", [1, 8, 21])
def test_a_shorter_prefix_is_as_if_there_had_been_no_more(name: str, length: int) -> None:
    for want, got in shorter_prefixes(unchecked(build(name), max_slots=4), TEXT, length):
        assert want.logits is not None and got.logits is not None
        assert (want.logits - got.logits).abs().max() < 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_a_tree_that_grows_level_by_level_equals_one_pass(name: str) -> None:
    target = unchecked(build(name), max_slots=2)
    slots = [target.acquire(), target.acquire()]
    run_text(target, slots, [[*TEXT, 8], [*TEXT[:4], 8]])
    whole = [s.logits for s in run_trees(target, slots, [TREE, TREE])]
    levels: list[list[Any]] = [[], []]
    for done, upto in [((0, 0), (1, 3)), ((1, 3), (3, 4)), ((3, 4), (7, 7))]:
        part = [TREE.keep(range(n)) for n in upto]
        for i, scores in enumerate(run_trees(target, slots, part, done=done)):
            levels[i].append(scores.logits)
    target.commit(slots, [[2, 4, 6], [1]])
    for i in range(2):
        assert whole[i] is not None and (torch.cat(levels[i]) - whole[i]).abs().max() < 1e-4
    assert right(name, target, slots[0], [*TEXT, 8, 4, 50, 7]) and right(name, target, slots[1], [*TEXT[:4], 8, 3])


@pytest.mark.parametrize("name", NAMES)
def test_a_finished_text_is_found_up_to_a_state_that_was_kept(name: str) -> None:
    """Of a text that ends as it was all of it; of one that goes another way up to a border; never more."""
    target = unchecked(build(name), max_slots=2)
    slot = target.acquire(TEXT)
    run_text(target, [slot], [[*TEXT, 0]])
    target.release(slot)
    for text, found in (([*TEXT, 5, 6], len(TEXT)), ([*TEXT[:14], 60, 60, 60], 12), ([60, *TEXT], 0)):
        slot = target.acquire(text)
        assert found - 8 <= target.length(slot) <= found and (found != len(TEXT) or target.length(slot) == found)
        run_text(target, [slot], [[*text[target.length(slot) :], 0]])
        assert right(name, target, slot, text)
        target.release(slot)


@pytest.mark.parametrize("name", NAMES)
def test_what_was_committed_from_trees_is_found_too(name: str) -> None:
    """Borders that an accepted path passes are kept, and a running text can be shared."""
    target = unchecked(build(name), max_slots=3)
    slot = target.acquire(TEXT)
    run_text(target, [slot], [TEXT[:6]])
    for begin in range(5, 20, 5):
        run_trees(target, [slot], [chain(TEXT[begin], TEXT[begin + 1 : begin + 8])])
        target.commit([slot], [[1, 2, 3, 4]])
    assert target.length(slot) == 20
    twin = target.acquire([*TEXT[:18], 60])
    assert 8 <= target.length(twin) <= 16
    run_text(target, [twin], [[*TEXT[target.length(twin) : 18], 0]])
    assert right(name, target, twin, TEXT[:18]) and right(name, target, slot, TEXT[:20])


def test_copies_of_a_text_are_few_and_evenly_spread() -> None:
    snapshots = Snapshots(4)
    for length in range(1, 1000):
        for border in snapshots.wanted(length - 1, length):
            snapshots.put(border, {})
        assert len(snapshots) <= PER_TEXT
        assert length < 4 or length - snapshots.last(length) <= length // 2
    snapshots.cut(0)
    assert snapshots.last(1000) == 0 and snapshots.wanted(0, 9) == [4, 8]


def test_a_state_from_the_wrong_place_of_a_text_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    put = Snapshots.put
    monkeypatch.setattr(Snapshots, "put", lambda self, n, s: put(self, n, {k: v / 2 for k, v in s.items()}))
    (pair, _) = shorter_prefixes(unchecked(build("mamba2"), max_slots=4), TEXT, 21)[::-1]
    assert pair[0].logits is not None and pair[1].logits is not None
    assert (pair[0].logits - pair[1].logits).abs().max() > 1e-3


def test_a_released_slot_leaves_nothing_behind() -> None:
    target = unchecked(build("mamba2"), max_slots=1)
    slot = target.acquire()
    run_text(target, [slot], [[*TEXT, 0]])
    target.release(slot)
    assert target.acquire() == slot and right("mamba2", target, slot, [])


def test_a_pass_that_fails_changes_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("mamba2")
    target = unchecked(model, max_slots=1)
    slot = target.acquire()
    run_text(target, [slot], [[*TEXT[:9], 0]])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model.backbone.norm_f, "forward", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            target.run([Piece(slot, TEXT[9:])], Needs())
    assert right("mamba2", target, slot, TEXT[:9])


def test_states_count_in_the_bytes_of_the_cache() -> None:
    """A state a slot and its copies: fewer slots where they do not fit, and a sentence where not one does."""
    model = build("mamba2")
    whole = unchecked(model, max_slots=8)
    assert isinstance(whole._cache, HybridSlots)
    one = whole.backend.slot_bytes(whole.max_rows)
    slot = whole.acquire()
    run_text(whole, [slot], [[*TEXT, 0]])
    run_trees(whole, [slot], [TREE])
    assert whole._cache.bytes <= 8 * one
    room = (whole.max_context + whole.max_rows + 1) * max(1, whole.backend.token_bytes)
    assert unchecked(model, max_slots=8, cache_bytes=3 * (one + room)).slots == 3
    with pytest.raises(InputError, match="bytes of states"):
        unchecked(model, cache_bytes=one // 2)


def test_text_and_trees_are_asked_for_together_and_run_apart() -> None:
    target = unchecked(build("mamba2"), max_slots=2)
    slots = [target.acquire(), target.acquire()]
    run_text(target, slots[:1], [[*TEXT[:9], 0]])
    assert not target.traits.mixes and not target.traits.same_bits
    tree: TokenTree = chain(8, [9])
    text, scores = target.run([Piece(slots[1], TEXT[:5]), Piece(slots[0], tree=tree)], Needs())
    assert text.logits is None and scores.logits is not None
    assert (scores.logits - plain("mamba2", [*TEXT[:9], 8, 9])[-2:]).abs().max() < 1e-4
    assert right("mamba2", target, slots[1], TEXT[:5])


@pytest.mark.parametrize("name", ["mamba2", "lfm2", "qwen3-next", "jamba"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_passes_the_check_at_load(name: str, dtype: torch.dtype) -> None:
    """Rounded where the model rounds, so that routers choose the same experts."""
    eager_target(copy.deepcopy(build(name)).to(dtype), max_slots=2)


def test_the_check_at_load_finds_what_another_version_of_a_function_would_do(monkeypatch: pytest.MonkeyPatch) -> None:
    right = mixers._STAND_INS["mamba2_chunk_scan"]
    without_skip = partial(_without, right, "D")
    monkeypatch.setitem(mixers._STAND_INS, "mamba2_chunk_scan", without_skip)
    with pytest.raises(UnsupportedModel, match="differently from plain forwards"):
        eager_target(build("mamba2"), max_slots=2)


def _without(function: Any, name: str, *args: Any, **named: Any) -> Any:
    return function(*args, **{**named, name: None})


def test_other_runtimes_refuse_states_with_a_sentence() -> None:
    with pytest.raises(UnsupportedModel, match="recurrent or state-space layers"):
        choice.build(build("mamba2"), "native")
    with pytest.raises(UnsupportedModel, match="states cannot be recorded; use the runtime eager"):
        cuda_target(build("mamba2"), capture=False)
    assert choice.build(build("mamba2"), max_slots=1).traits.runtime == "eager"
