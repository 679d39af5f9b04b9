"""Side rows through the engine: the text is plain's whatever they are, and nothing counts or keeps them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from outrider.constrain.finite import Finite
from outrider.control.fixed import Fixed
from outrider.core.engine import Engine
from outrider.core.params import SamplingParams
from outrider.core.proposals import Proposals
from outrider.core.protocols import Recipe
from outrider.core.records import NO_NEEDS, Budget, StepRecord
from outrider.core.rows.side import SideRows, chains
from outrider.core.tree import TokenTree, from_paths
from outrider.runtime import flight
from outrider.runtime.slots import SlotTarget
from outrider.runtime.targets import eager_target, native_target
from outrider.verify.invariant import Invariant

PROMPTS = [[1, 2, 3, 4, 5], [9, 8, 7], [5], [6, 7, 6, 7, 6]]
PLAIN = Recipe("plain", None, Invariant(), Fixed(Budget(0, 0)))


class Guesses:
    """Proposes what the last side row said, with two rows behind every node."""

    name, needs, shared_noise = "guesses", NO_NEEDS, False

    def __init__(self, most: int = 64) -> None:
        self.contexts: dict[int, Any] = {}
        self.found: dict[int, list[int]] = {}
        self.seen, self.most = 0, most  # rows that came back

    def begin(self, slot: int, context: Any) -> None:
        self.contexts[slot] = context

    def absorb(self, chunks: Any) -> None: ...

    def end(self, slot: int) -> None:
        self.contexts.pop(slot), self.found.pop(slot, None)

    def propose(self, slots: Sequence[int], budgets: Sequence[Budget], noise: Any) -> Proposals:
        trees = []
        for slot, budget in zip(slots, budgets, strict=True):
            tokens, paths = self.found.get(slot, []), []
            if budget.nodes >= 2 and budget.depth >= 1:
                paths = [[token] for token in dict.fromkeys(tokens[:2])]
            trees.append(from_paths(int(self.contexts[slot].tokens[-1]), paths))
        return Proposals(trees, 1)

    def side_rows(self, slots: Sequence[int], trees: Sequence[TokenTree]) -> Sequence[SideRows | None]:
        torch.manual_seed(len(trees))
        return [chains(range(len(tree)), [min(self.most, 2)] * len(tree), torch.randn(2, 32)) for tree in trees]

    def observe(self, slots: Sequence[int], records: Sequence[StepRecord]) -> None:
        for slot, record in zip(slots, records, strict=True):
            if (side := record.scores.side) is not None:
                assert side.logits is not None and record.scores.logits is not None
                assert len(record.scores.logits) == len(record.tree)
                self.seen += len(side.logits)
                self.found[slot] = side.logits.argmax(-1).tolist()


@pytest.fixture(scope="module", params=["eager", "native"])
def target(request: pytest.FixtureRequest, tiny_llama) -> Iterator[SlotTarget]:
    make = {"eager": eager_target, "native": native_target}[request.param]
    yield make(tiny_llama.model, max_slots=3, max_rows=16)


def run(
    target: SlotTarget, drafter: Any = None, prompts: Any = PROMPTS, constraint: Any = None, **sampling: Any
) -> list[Any]:  # fmt: skip
    recipe = PLAIN if drafter is None else Recipe("guesses", drafter, Invariant(), Fixed(Budget(4, 2)))
    engine = Engine(target, PLAIN, strict=True)
    params = SamplingParams(**{"max_new_tokens": 11, "seed": 3} | sampling)
    handles = [engine.submit(prompt, params, recipe, constraint=constraint) for prompt in prompts]
    return [handle.result() for handle in handles]


def texts(results: Sequence[Any]) -> list[list[int]]:
    return [result.token_ids for result in results]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "repetition_penalty": 1.3, "logprobs": 2}])
def test_text_is_plains_in_a_batch_and_with_reused_prefixes(target: SlotTarget, sampling: dict[str, Any]) -> None:
    """Four prompts for three slots; then texts that begin like those that have ended."""
    drafter, plain = Guesses(), run(target, **sampling)
    assert texts(run(target, drafter, **sampling)) == texts(plain)
    longer = [[*prompt, *result.token_ids[:7]] for prompt, result in zip(PROMPTS, plain, strict=True)]
    assert texts(run(target, drafter, longer, **sampling)) == texts(run(target, prompts=longer, **sampling))
    assert drafter.seen > 40 and target.free_slots == 3
    for result in plain:
        assert max(result.token_ids) < target.vocab_size


def test_text_under_a_grammar_is_plains_and_legal(target: SlotTarget) -> None:
    # 5 6 (1 | 3)* 4 7 8
    grammar = Finite([{5: 1}, {6: 2}, {1: 2, 3: 2, 4: 3}, {7: 4}, {8: 5}, {}], frozenset({5}), target.vocab_size)
    drafter = Guesses()
    for sampling in ({}, {"temperature": 1.0}):
        found = run(target, drafter, constraint=grammar, **sampling)
        assert texts(found) == texts(run(target, constraint=grammar, **sampling))
        for result in found:
            assert result.token_ids[:2] == [5, 6] and set(result.token_ids[2:]) <= {1, 3, 4, 7, 8, 2}
    assert drafter.seen > 0


def test_statistics_count_candidates_only(target: SlotTarget) -> None:
    drafter = Guesses()
    results = run(target, drafter, trace=True)
    assert sum(g.stats.drafted for g in results) < drafter.seen / 2
    for result in results:
        assert result.stats.new_tokens == len(result.token_ids) == len(result.origins)
        assert result.stats.accepted == sum(origin.depth > 0 for origin in result.origins)
        steps = result.trace.as_dict()["steps"]
        assert sum(len(step["tree"]["tokens"]) - 1 for step in steps) == result.stats.drafted


def test_rows_for_which_there_is_no_room_are_left_out(tiny_llama) -> None:
    narrow = eager_target(tiny_llama.model, max_slots=3, max_rows=3)
    short = eager_target(tiny_llama.model, max_slots=3, max_context=24)
    for target in (narrow, short):
        drafter = Guesses()
        assert texts(run(target, drafter)) == texts(run(target))
        assert drafter.seen > 0


def seen_by_candidates(*of: Any) -> flight.Block:
    block = _side_block(*of)
    block.sees[:, -1] = True
    return block


_side_block = flight.side_block


def test_rows_that_candidates_see_are_caught(target: SlotTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = texts(run(target))
    monkeypatch.setattr("outrider.runtime.slots.side_block", seen_by_candidates)
    assert texts(run(target, Guesses())) != plain


def test_rows_that_stay_in_a_cache_are_caught(target: SlotTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pending token's place given to the first side row when a step is kept."""
    plain, keep = texts(run(target)), type(target._cache).keep

    def wrong(self: Any, slots: Any, lengths: Any, paths: Any) -> None:
        keep(self, slots, lengths, paths)
        if slots:
            self.move([slots[0]], [lengths[0] + 1], [lengths[0]])

    monkeypatch.setattr(type(target._cache), "keep", wrong)
    assert texts(run(target, Guesses())) != plain
