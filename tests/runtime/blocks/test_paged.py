"""Blocks with several holders, in any order of calls: every text stays what it is, no block is lost or freed twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from outrider.core.errors import CacheFull, OutriderError
from outrider.runtime.blocks.paged import PagedSlots
from outrider.runtime.blocks.pool import BlockPool
from outrider.runtime.blocks.prefixes import Prefixes
from outrider.runtime.blocks.texts import as_tokens, nearest

SLOTS, SIZE, CAPACITY, WORDS = 4, 4, 24, 2
SALTS = ("", "a", "b")
NAMES = ("acquire", "acquire", "text", "text", "text", "tree", "fork", "truncate", "release")
Call = tuple[str, list[int]]
calls = st.lists(st.tuples(st.sampled_from(NAMES), st.lists(st.integers(0, 999), min_size=4, max_size=4)), max_size=40)


@dataclass
class Walk:
    """A pool, the rows in its blocks, and beside it what each slot should hold."""

    blocks: int = 12
    slots: PagedSlots = field(init=False)
    rows: NDArray[np.int64] = field(init=False)  # [blocks, SIZE]: the token and the salt that stand there
    texts: dict[int, tuple[int, list[int]]] = field(default_factory=dict)  # salt and tokens of slots in use
    asked: dict[int, bool] = field(default_factory=dict)  # whether a slot was acquired with tokens
    finished: list[tuple[int, list[int]]] = field(default_factory=list)  # while nothing was evicted: all of them
    evicted: bool = False

    def __post_init__(self) -> None:
        self.rows = np.full((self.blocks, SIZE), -1)
        self.slots = PagedSlots(SLOTS, self.blocks, SIZE, CAPACITY, self.copy)

    def copy(self, source: int, target: int, count: int) -> None:
        self.rows[target, :count] = self.rows[source, :count]

    def do(self, call: Call) -> None:
        name, numbers = call
        if name == "acquire" or not self.texts:
            self.acquire(numbers)
        else:
            slot = sorted(self.texts)[numbers[0] % len(self.texts)]
            salt, text = self.texts[slot]
            if name == "text":
                self.write(slot, tokens_of(numbers[1], 1 + numbers[2] % 9), stays=True)
            elif name == "tree":
                self.write(slot, [1000 + n for n in range(1 + numbers[2] % 6)], stays=False)
            elif name == "truncate":
                length = numbers[1] % (len(text) + 1)
                self.slots.truncate(slot, length)
                del text[length:]
            elif name == "release":
                if self.asked[slot]:
                    self.finished.append((salt, text))
                del self.texts[slot]
                self.slots.release(slot)
            elif len(self.texts) < SLOTS:
                length = numbers[1] % (len(text) + 1)
                twin = self.slots.fork(slot, length)
                assert twin is not None
                self.texts[twin], self.asked[twin] = (salt, text[:length]), self.asked[slot]
        self.look()

    def acquire(self, numbers: list[int]) -> None:
        salt, wanted = numbers[0] % len(SALTS), tokens_of(numbers[1], numbers[2] % CAPACITY)
        slot = self.slots.acquire(as_tokens(wanted), SALTS[salt])
        assert (slot is None) == (len(self.texts) == SLOTS)
        if slot is None:
            return
        held = self.slots.length(slot)
        known = [*self.finished, *(text for other, text in self.texts.items() if self.asked[other])]
        best = max((in_common(text, wanted) for other, text in known if other == salt), default=0)
        assert held <= best if self.evicted else held == best
        self.texts[slot], self.asked[slot] = (salt, wanted[:held]), bool(wanted)

    def write(self, slot: int, tokens: list[int], *, stays: bool) -> None:
        """As a pass does: rows behind the text, which may stay."""
        salt, text = self.texts[slot]
        reach = len(text) + len(tokens)
        fits, kept = self.slots.fits({slot: reach}), len(self.slots.prefixes)
        if not fits:
            assert reach > CAPACITY or -(-reach // SIZE) + len(self.slots.prefixes) >= self.slots.pool.free
            if reach <= CAPACITY:
                with pytest.raises(CacheFull):
                    self.slots.reserve({slot: reach})
                self.evicted = True
            return
        self.slots.reserve({slot: reach})
        self.evicted = self.evicted or len(self.slots.prefixes) < kept
        for place, token in enumerate(tokens, len(text)):
            self.rows[self.slots.table[slot, place // SIZE], place % SIZE] = token * len(SALTS) + salt
        if stays:
            self.slots.append(slot, as_tokens(tokens))
            text.extend(tokens)

    def look(self) -> None:
        """Every slot holds its text, and a block as many holders as hold it."""
        pool, kept = self.slots.pool, self.slots.prefixes._nodes
        holders = Counter(list(kept))
        for slot, (salt, text) in self.texts.items():
            blocks = self.slots.table[slot, : self.slots._counts[slot]].tolist()
            holders.update(blocks)
            places = [(blocks[place // SIZE], place % SIZE) for place in range(len(text))]
            assert [self.rows[at] for at in places] == [token * len(SALTS) + salt for token in text]
            assert len(blocks) >= -(-len(text) // SIZE) and self.slots.length(slot) == len(text)
        assert pool.holders.tolist() == [holders[block] for block in range(pool.count)]
        assert pool.free == pool.count - len(holders) and len(set(pool._free)) == len(pool._free)
        assert self.slots.free_slots == SLOTS - len(self.texts)
        assert self.slots.prefixes.spare == sum(holders[block] == 1 for block in kept)


def tokens_of(number: int, count: int) -> list[int]:
    """Of few words, so that texts often begin alike."""
    return [(number >> min(n, 9)) % WORDS for n in range(count)]


def in_common(one: list[int], other: list[int]) -> int:
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@settings(deadline=None, max_examples=300)
@given(calls, st.sampled_from([6, 12, 100]))
def test_any_order_of_calls_leaves_every_text_what_it_is_and_every_block_with_its_holders(
    done: list[Call], blocks: int
) -> None:
    walk = Walk(blocks)
    for call in done:
        walk.do(call)
    for slot in list(walk.texts):
        walk.slots.release(slot)
    walk.slots.prefixes.evict(blocks)
    assert walk.slots.pool.free == blocks and not walk.slots.prefixes._roots


def random_calls(seed: int) -> list[Call]:
    rng = np.random.default_rng(seed)
    return [(NAMES[rng.integers(len(NAMES))], rng.integers(0, 1000, 4).tolist()) for _ in range(60)]


def blind_to_salts(found: Callable[..., tuple[list[int], int]]) -> Callable[..., tuple[list[int], int]]:
    return lambda self, tokens, salt: max((found(self, tokens, one) for one in SALTS), key=lambda blocks: blocks[1])


BUGS = {
    "a shared block is written": (PagedSlots, "_shared", lambda self, slot, reach: False),
    "a holder is not counted": (BlockPool, "hold", lambda self, block: None),
    "a block is never dropped": (PagedSlots, "_shrink", lambda self, slot, length: None),
    "any caller's texts are found": (Prefixes, "find", blind_to_salts(Prefixes.find)),
    "nothing is evicted": (Prefixes, "evict", lambda self, wanted: None),
    "nothing finished is found": (Prefixes, "add", lambda self, *_: None),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, wrong = BUGS[bug]
    monkeypatch.setattr(owner, name, wrong)
    with pytest.raises((AssertionError, OutriderError, IndexError)):
        for seed in range(100):
            walk = Walk(12)
            for call in random_calls(seed):
                walk.do(call)


def finished(slots: PagedSlots, tokens: list[int], salt: str = "") -> None:
    slot = slots.acquire(as_tokens(tokens), salt)
    assert slot is not None
    rest = tokens[slots.length(slot) :]
    slots.reserve({slot: len(tokens)})
    slots.append(slot, as_tokens(rest))
    slots.release(slot)


def held_of(slots: PagedSlots, tokens: list[int], salt: str = "") -> int:
    slot = slots.acquire(as_tokens(tokens), salt)
    assert slot is not None
    length = slots.length(slot)
    slots.release(slot)
    return length


def many(blocks: int = 12) -> PagedSlots:
    return PagedSlots(SLOTS, blocks, SIZE, 100, lambda *_: None)


def test_a_text_that_goes_on_after_its_end_is_found_whole_and_kept_once() -> None:
    slots, text = many(), list(range(50, 80))
    for end in (10, 17, 30):
        finished(slots, text[:end])
        assert held_of(slots, text) == end
        assert len(slots.prefixes) == -(-end // SIZE)


def test_texts_with_the_same_beginning_hold_its_blocks_together() -> None:
    slots, shared = many(), list(range(50, 70))
    finished(slots, [*shared, 1, 2, 3])
    used = slots.pool.count - slots.pool.free
    running = [slots.acquire(as_tokens([*shared, n]), "") for n in range(3)]
    assert [slots.length(slot) for slot in running if slot is not None] == [20, 21, 20]
    assert slots.pool.count - slots.pool.free == used


def test_a_running_text_is_found_too_and_is_not_changed_by_who_goes_on_from_it() -> None:
    slots, text = many(), [5, 6, 7, 8, 9, 10]
    first = slots.acquire(as_tokens(text), "")
    assert first is not None
    slots.reserve({first: 6})
    slots.append(first, as_tokens(text))
    second = slots.acquire(as_tokens([5, 6, 7, 8, 9, 11]), "")
    assert second is not None and slots.length(second) == 5
    assert slots.table[first, :2].tolist() == slots.table[second, :2].tolist()
    slots.reserve({second: 6})
    assert slots.table[first, 0] == slots.table[second, 0] and slots.table[first, 1] != slots.table[second, 1]


def test_the_text_used_longest_ago_is_forgotten_first_and_its_end_before_its_beginning() -> None:
    slots = many(6)
    for name in (100, 200, 300):
        finished(slots, [name + n for n in range(8)])
    held_of(slots, [100 + n for n in range(8)])
    slots.prefixes.evict(3)
    assert [held_of(slots, [name + n for n in range(8)]) for name in (100, 200, 300)] == [8, 0, 4]


def test_what_was_acquired_without_tokens_is_not_kept() -> None:
    slots = many()
    slot = slots.acquire(as_tokens([]), "")
    assert slot is not None
    slots.reserve({slot: 8})
    slots.append(slot, as_tokens(range(8)))
    slots.release(slot)
    assert slots.pool.free == slots.pool.count


def test_a_pass_that_does_not_fit_changes_nothing_for_the_slots() -> None:
    slots = many(3)
    one, other = slots.acquire(as_tokens([1]), ""), slots.acquire(as_tokens([2]), "")
    assert one is not None and other is not None
    slots.reserve({one: 8})
    assert not slots.fits({one: 8, other: 8}) and slots.fits({one: 8, other: 4})
    with pytest.raises(CacheFull, match="raise cache_bytes"):
        slots.reserve({one: 8, other: 8})
    assert slots.pool.free == 1
    slots.release(one)
    assert slots.fits({other: 12})


def test_a_block_kept_twice_over_can_still_be_freed() -> None:
    """A twin holds the end of a text whose beginning is kept in another's blocks."""
    slots, text = many(5), [5, 6, 7, 8, 9, 10]
    finished(slots, text[:4])
    slot = slots.acquire(as_tokens([]), "")
    assert slot is not None
    slots._texts[slot].findable = True
    slots.reserve({slot: 6})
    slots.append(slot, as_tokens(text))
    twin = slots.fork(slot, 6)
    assert twin is not None
    slots.release(slot)
    assert slots.prefixes.spare == 1 and slots.fits({twin: 16})
    slots.reserve({twin: 16})
    assert not len(slots.prefixes)


def test_of_texts_in_slots_the_one_with_most_in_common_is_nearest() -> None:
    slots = many()
    for tokens in ([1, 2, 3], [1, 2, 4, 5], [9]):
        slot = slots.acquire(as_tokens(tokens), "x")
        assert slot is not None
        slots.reserve({slot: len(tokens)})
        slots.append(slot, as_tokens(tokens[slots.length(slot) :]))
    wanted = as_tokens([1, 2, 4, 6])
    assert nearest(slots._texts.items(), wanted, "x") == (1, 3)
    assert nearest(slots._texts.items(), wanted, "y") == (-1, 0)
