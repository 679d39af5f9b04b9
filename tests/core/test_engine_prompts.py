"""Prompts: several share a pass, each drafter is handed its stretches, and no way of cutting them changes a token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.check.toy import ToyLM, ToyTarget
from outrider.control.fixed import Fixed
from outrider.control.goodput import Goodput
from outrider.core.engine import Engine
from outrider.core.errors import PassFailed
from outrider.core.generation import FinishReason, Generation
from outrider.core.protocols import Context, Drafter, Part, Recipe
from outrider.core.records import Budget, Chunk, Needs, Piece, Role, Scores
from outrider.core.sampling import SamplingParams
from outrider.draft.grown import Grown
from outrider.draft.lookup.byte_lookup import ByteLookup
from outrider.draft.lookup.predicted import Predicted
from outrider.draft.lookup.prompt_lookup import PromptLookup
from outrider.draft.lookup.retrieval import Retrieval
from outrider.draft.lookup.suffix import Suffix
from outrider.draft.mix import Mix
from outrider.draft.model.draft_model import ModelSource
from outrider.draft.table.aded import Aded
from outrider.draft.table.jacobi import Jacobi
from outrider.draft.table.lookahead import Lookahead
from outrider.draft.table.recycling import Recycling
from outrider.draft.table.stand import Stand
from outrider.grow.chain import Chain
from outrider.store.store import Store
from outrider.verify.invariant import Invariant
from tests.store.conftest import make_store

VOCAB = 5
LM = ToyLM(VOCAB, seed=4, order=2, concentration=0.3)
PROMPTS = [[1], [2, 3, 1, 2], [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1], [3, 3, 3, 4, 3, 3, 3]]
PLAIN = Recipe("plain", None, Invariant(), Fixed(Budget(0, 0)))


def recipe(drafter: Drafter, name: str = "listens") -> Recipe:
    return Recipe(name, drafter, Invariant(), Fixed(Budget(4, 3)))


def drain(engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams, method: Recipe) -> list[Generation]:
    handles = [engine.submit(prompt, params, method) for prompt in prompts]
    return [generation for handle in handles for generation in handle.results()]


class Passes(ToyTarget):
    """Notes the text of every pass that has some, and fails in one of them where it is told to."""

    def __init__(self, prompt_rows: int, slots: int = 6, fails: int = -1) -> None:
        super().__init__(LM, slots, prompt_rows=prompt_rows)
        self.texts: list[list[tuple[int, list[int]]]] = []
        self.fails = fails

    def run(self, pieces: Sequence[Piece], needs: Needs) -> list[Scores]:
        if texts := [(piece.slot, list(piece.tokens)) for piece in pieces if piece.tree is None]:
            if len(self.texts) == self.fails:
                raise MemoryError("planted")
            self.texts.append(texts)
        return super().run(pieces, needs)


@dataclass
class Listens(PromptLookup):
    """Notes what it is handed, call by call."""

    calls: list[list[Chunk]] = field(default_factory=list)
    prompts: dict[int, list[int]] = field(default_factory=dict)
    fails: bool = False

    def begin(self, slot: int, context: Context) -> None:
        super().begin(slot, context)
        self.prompts[slot] = list(context.prompt)

    def absorb(self, chunks: Sequence[Chunk]) -> None:
        if self.fails:
            raise RuntimeError("planted")
        self.calls.append(list(chunks))

    def heard(self, slot: int) -> list[int]:
        """The tokens that it was handed of this slot's prompt; they must have come in order, without a gap."""
        heard: list[int] = []
        for chunk in (chunk for call in self.calls for chunk in call if chunk.slot == slot):
            assert chunk.start == len(heard)
            heard += map(int, chunk.tokens)
        return heard


def test_prompts_of_different_length_share_passes_that_are_as_full_as_asked() -> None:
    target = Passes(prompt_rows=6)
    engine = Engine(target, PLAIN, strict=True, clock=lambda: 0.0)
    drain(engine, PROMPTS, SamplingParams(max_new_tokens=2), PLAIN)
    # 3, 11 and 6 rows: the oldest first, and the next one in what it leaves of a pass.
    assert [[len(tokens) for _, tokens in texts] for texts in target.texts] == [[3, 3], [6], [2, 4], [2]]
    for slot, prompt in enumerate(PROMPTS):
        assert [t for texts in target.texts for at, tokens in texts if at == slot for t in tokens] == prompt[:-1]


@pytest.mark.parametrize("needs", [Needs(), Needs(logits=True, hidden=(-1,))], ids=["nothing", "rows"])
@pytest.mark.parametrize("prompt_rows", [1, 6, 512])
def test_each_drafter_gets_exactly_its_stretches_in_order_whole_and_once(prompt_rows: int, needs: Needs) -> None:
    target = Passes(prompt_rows)
    engine = Engine(target, PLAIN, strict=True)
    one, other = Listens(needs=needs), Listens()
    methods = [recipe(one), recipe(other), PLAIN]
    prompts = [PROMPTS[i] for i in (2, 3, 1, 3, 2, 1)]
    params = SamplingParams(max_new_tokens=9)
    handles = [engine.submit(prompt, params, methods[i % 3]) for i, prompt in enumerate(prompts)]
    while not all(handle.done for handle in handles):
        engine.step()
    assert (sorted(one.prompts), sorted(other.prompts)) == ([0, 3], [1, 4])
    for drafter in (one, other):
        for slot, prompt in drafter.prompts.items():
            assert drafter.heard(slot) == prompt[:-1]
        assert all(len({chunk.slot for chunk in call}) == len(call) > 0 for call in drafter.calls)
        passes = sum(any(slot in drafter.prompts for slot, _ in texts) for texts in target.texts)
        assert len(drafter.calls) == passes  # all slots of a pass in one call
    for chunk in (chunk for call in one.calls for chunk in call if needs.logits):
        assert chunk.scores.logits is not None and chunk.scores.hidden[-1].shape[0] == len(chunk.tokens)
        want = [LM.probs(one.prompts[chunk.slot][: chunk.start + i + 1]) for i in range(len(chunk.tokens))]
        np.testing.assert_allclose(chunk.scores.logits.exp().numpy(), want)


def test_a_prompt_of_one_token_runs_nothing() -> None:
    target, drafter = Passes(3), Listens()
    drain(Engine(target, PLAIN, strict=True), [[1], [2]], SamplingParams(max_new_tokens=3), recipe(drafter))
    assert target.texts == [] and drafter.calls == [] and drafter.prompts == {0: [1], 1: [2]}


def test_samples_of_one_prompt_run_it_once_unless_their_drafter_asks_for_its_rows() -> None:
    params = SamplingParams(max_new_tokens=4, temperature=1.0, seed=1, n=3)
    for needs, copies in ((Needs(), 1), (Needs(top=2), 1), (Needs(logits=True), 3), (Needs(hidden=(-1,)), 3)):
        target, drafter = Passes(512), Listens(needs=needs)
        drain(Engine(target, PLAIN, strict=True), PROMPTS[1:2], params, recipe(drafter))
        assert target.texts == [[(slot, PROMPTS[1][:-1]) for slot in range(copies)]]
        assert [slot for slot in range(3) if drafter.heard(slot)] == list(range(copies))
        assert sorted(drafter.prompts) == [0, 1, 2]


def test_a_drafter_that_fails_over_a_prompt_leaves_those_of_other_methods_alone() -> None:
    engine = Engine(Passes(2), PLAIN)
    bad, good = Listens(fails=True), Listens()
    methods = [recipe(bad, "bad"), recipe(good, "good")]
    params = SamplingParams(max_new_tokens=12)
    handles = [engine.submit(PROMPTS[i % 4], params, methods[i % 2]) for i in range(2, 6)]
    made = [handle.result() for handle in handles]
    assert [g.stats.drafter_failures for g in made] == [1, 0, 0, 0]  # the third has nothing that could be absorbed
    assert bad._slots == {} and all(good.heard(slot) == prompt[:-1] for slot, prompt in good.prompts.items())
    plain = drain(Engine(Passes(512), PLAIN), [PROMPTS[i % 4] for i in range(2, 6)], params, PLAIN)
    assert [g.token_ids for g in made] == [g.token_ids for g in plain]
    with pytest.raises(RuntimeError, match="planted"):
        drain(Engine(Passes(2), PLAIN, strict=True), PROMPTS, params, recipe(Listens(fails=True)))


@pytest.mark.parametrize("fails", [0, 1])
def test_a_target_that_fails_over_prompts_leaves_nothing_behind(fails: int) -> None:
    target, drafter = Passes(4, fails=fails), Listens()
    engine = Engine(target, PLAIN)
    params = SamplingParams(max_new_tokens=5, temperature=1.0, seed=1, n=2)
    handles = [engine.submit(prompt, params, recipe(drafter)) for prompt in PROMPTS * 2]  # some have to wait
    while engine.step():
        pass
    assert target.free_slots == 6 and not engine.running and not engine.queue and drafter._slots == {}
    assert all(handle.done for handle in handles)
    assert {g.finish_reason for g in handles[2].partial()} == {FinishReason.ERROR}  # nothing of its prompt ever runs
    with pytest.raises(PassFailed, match="planted"):
        handles[2].results()
    assert handles[0].result().token_ids  # a prompt of one token runs nothing that could fail
    target.fails = -1
    assert drain(engine, PROMPTS, SamplingParams(max_new_tokens=3), PLAIN)[1].token_ids  # the engine goes on


# Text does not depend on how prompts were cut and who came when


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Store:
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, VOCAB, 60).tolist() for _ in range(3)]
    return make_store(tmp_path_factory.mktemp("corpus"), [documents], VOCAB)


def mixture() -> Mix:
    """Asked for all it has, whatever it brings."""
    parts = [Part(PromptLookup(), Role.FREE), Part(Recycling(VOCAB), Role.LOOKS)]
    return Mix(parts, Goodput(Budget(6, 4), [part.role for part in parts]))


DRAFTERS: dict[str, Callable[[Store], Drafter]] = {
    "prompt-lookup": lambda corpus: PromptLookup(),
    "suffix": lambda corpus: Suffix(memory_bytes=1 << 20),
    "predicted": lambda corpus: Predicted(),
    "retrieval": lambda corpus: Retrieval(corpus),
    "byte-lookup": lambda corpus: ByteLookup([bytes([97 + i, 98 + i]) for i in range(VOCAB)]),
    "token-recycling": lambda corpus: Recycling(VOCAB),
    "stand": lambda corpus: Stand(VOCAB, sampled=False, memory_bytes=1 << 20),
    "aded": lambda corpus: Aded(VOCAB, memory_bytes=1 << 20),
    "lookahead": lambda corpus: Lookahead(),
    "jacobi": lambda corpus: Jacobi(window=4),
    "mix": lambda corpus: mixture(),
    "draft-model": lambda corpus: Grown(ModelSource(ToyTarget(ToyLM(VOCAB, seed=8), 6)), Chain()),
}


@pytest.mark.parametrize("name", DRAFTERS)
@settings(max_examples=6, deadline=None)
@given(
    order=st.permutations(range(4)), waits=st.lists(st.integers(0, 2), min_size=4, max_size=4),
    prompt_rows=st.sampled_from([1, 3, 7, 512]), temperature=st.sampled_from([0.0, 1.0]),
)  # fmt: skip
def test_text_is_the_same_for_any_arrival_order_and_any_cut(
    name: str, corpus: Store, order: list[int], waits: list[int], prompt_rows: int, temperature: float
) -> None:
    params = SamplingParams(max_new_tokens=14, temperature=temperature, seed=3, prediction=(1, 2, 3, 4, 0, 1))
    want = [drain(Engine(ToyTarget(LM), PLAIN, strict=True), [p], params, PLAIN)[0].token_ids for p in PROMPTS]
    engine = Engine(ToyTarget(LM, slots=3, prompt_rows=prompt_rows), recipe(DRAFTERS[name](corpus)), strict=True)
    handles = {}
    for i, wait in zip(order, waits, strict=True):
        handles[i] = engine.submit(PROMPTS[i], params)
        for _ in range(wait):
            engine.step()
    assert [handles[i].result().token_ids for i in range(4)] == want
