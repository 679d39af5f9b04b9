"""The loop: same output whatever the drafter accepts, exact stops, joining and leaving, failures contained."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.control.fixed import Fixed
from outrider.core.engine import Engine
from outrider.core.errors import ClosedEngine, EmptySupport, InputError, OutriderError
from outrider.core.generation import FinishReason, Generation
from outrider.core.proposals import Proposals
from outrider.core.protocols import Recipe
from outrider.core.records import Budget, Needs
from outrider.core.sampling import SamplingParams
from outrider.core.tree import chain, root
from outrider.draft.forced import Forced
from outrider.draft.lookup.prompt_lookup import PromptLookup
from outrider.runtime.targets import eager_target
from outrider.verify.invariant import Invariant
from outrider.verify.recursive import Recursive

VOCAB = 61
PROMPTS = [[1, 2, 3, 4, 5], [9, 8, 7], [5], [11, 12, 11, 12, 11, 12], [40, 2, 40]]
PLAIN = Recipe("plain", None, Invariant(), Fixed(Budget(0, 0)))


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=96, initializer_range=0.4, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def engine(model: LlamaForCausalLM) -> Engine:
    return Engine(eager_target(model, max_slots=4), PLAIN, decode=_letters, strict=True)


def _letters(ids) -> str:
    return "".join(chr(ord("A") + i) for i in ids)


def run(engine: Engine, prompts, params: SamplingParams, recipe: Recipe = PLAIN) -> list[Generation]:
    handles = [engine.submit(p, params, recipe) for p in prompts]
    return [g for h in handles for g in h.results()]


def forced(plain: list[Generation], accept: float, decoys: int = 0, nodes: int = 24, depth: int = 8) -> Recipe:
    answers = {tuple(p): g.token_ids for p, g in zip(PROMPTS, plain, strict=True)}
    drafter = Forced(lambda context: answers[tuple(context.prompt)], VOCAB, accept, decoys)
    return Recipe("forced", drafter, Invariant(), Fixed(Budget(nodes, depth)))


def test_plain_decoding_is_transformers_greedy(engine: Engine, model: LlamaForCausalLM) -> None:
    for prompt, ours in zip(PROMPTS, run(engine, PROMPTS, SamplingParams(max_new_tokens=40)), strict=True):
        theirs = model.generate(
            torch.tensor([prompt]), max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert ours.token_ids == theirs[0, len(prompt) :].tolist()


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("decoys", [0, 2])
@pytest.mark.parametrize("accept", [0.0, 0.6, 1.0])
def test_output_is_the_same_whatever_is_accepted(
    engine: Engine, accept: float, decoys: int, temperature: float
) -> None:
    params = SamplingParams(max_new_tokens=33, temperature=temperature, seed=4, top_p=0.9, repetition_penalty=1.1)
    plain = run(engine, PROMPTS, params)
    recipe = forced(plain, accept, decoys)
    again = run(engine, PROMPTS, params, recipe)
    assert [g.token_ids for g in again] == [g.token_ids for g in plain]
    accepted = [g.stats.mean_accepted for g in again]
    if accept == 1.0:
        assert min(accepted) >= 33 / np.ceil(33 / 9)  # every step takes all that was offered
    if accept == 0.0:
        assert max(accepted) == 1.0


@pytest.fixture(scope="module")
def free(model: LlamaForCausalLM) -> list[Generation]:
    """What is said where nothing stops it."""
    engine = Engine(eager_target(model, max_slots=4), PLAIN, decode=_letters, strict=True)
    return run(engine, PROMPTS, SamplingParams(max_new_tokens=30))


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_stops_cut_an_accepted_run_where_plain_decoding_stops(model: LlamaForCausalLM, free, data) -> None:
    engine = Engine(eager_target(model, max_slots=4), PLAIN, decode=_letters, strict=True)
    which = data.draw(st.integers(0, len(PROMPTS) - 1))
    at = data.draw(st.integers(0, 28))
    kind = data.draw(st.sampled_from(["string", "id", "length", "eos"]))
    ids = free[which].token_ids
    changes: dict[str, object] = {"max_new_tokens": 30}
    if kind == "string":
        width = data.draw(st.integers(1, 3))
        changes["stop"] = (_letters(ids[at : at + width]),)
    elif kind == "id":
        changes["stop_token_ids"] = (ids[at],)
    elif kind == "length":
        changes["max_new_tokens"] = at + 1
    else:
        engine.eos_ids = frozenset({ids[at]})
    params = SamplingParams(**changes)
    plain = run(engine, PROMPTS, params)
    accept = data.draw(st.sampled_from([0.5, 1.0]))
    recipe = forced(free, accept, data.draw(st.integers(0, 2)), depth=data.draw(st.integers(1, 16)))
    for mine, theirs in zip(run(engine, PROMPTS, params, recipe), plain, strict=True):
        assert mine.token_ids == theirs.token_ids
        assert mine.text == theirs.text
        assert mine.finish_reason == theirs.finish_reason
        assert mine.stats.new_tokens == len(mine.token_ids) == len(mine.origins)
        assert mine.stats.accepted == sum(o.depth > 0 for o in mine.origins)


@settings(max_examples=20, deadline=None)
@given(depth=st.integers(1, 16), stop=st.sampled_from(["", "B", "KQ", "ZZZ"]), seed=st.integers(0, 5))
def test_streamed_pieces_join_to_the_text(model: LlamaForCausalLM, depth: int, stop: str, seed: int) -> None:
    engine = Engine(eager_target(model, max_slots=4), PLAIN, decode=_letters, strict=True)
    params = SamplingParams(max_new_tokens=40, temperature=1.0, seed=seed, stop=(stop,) if stop else ())
    plain = run(engine, PROMPTS, params)
    for prompt, want in zip(PROMPTS, plain, strict=True):
        handle = engine.submit(prompt, params, forced(plain, 0.8, depth=depth))
        pieces = list(handle.pieces())
        assert "".join(pieces) == handle.result().text == want.text


def test_seeded_output_does_not_depend_on_batch_drafter_or_slot_order(engine: Engine) -> None:
    params = SamplingParams(max_new_tokens=25, temperature=1.0, seed=9, top_k=20)
    together = run(engine, PROMPTS, params)
    alone = [run(engine, [p], params)[0] for p in PROMPTS]
    shuffled = run(engine, PROMPTS[::-1], params, Recipe("pl", PromptLookup(), Invariant(), Fixed(Budget(7, 7))))[::-1]
    assert [g.token_ids for g in together] == [g.token_ids for g in alone] == [g.token_ids for g in shuffled]


def test_samples_of_one_prompt_differ_and_repeat(engine: Engine) -> None:
    params = SamplingParams(max_new_tokens=20, temperature=1.0, seed=2, n=6)
    first, second = run(engine, PROMPTS[:1], params), run(engine, PROMPTS[:1], params)
    assert [g.token_ids for g in first] == [g.token_ids for g in second]
    assert len({tuple(g.token_ids) for g in first}) > 3
    assert [g.sample for g in first] == list(range(6))
    single = run(engine, PROMPTS[:1], SamplingParams(max_new_tokens=20, temperature=1.0, seed=2))
    assert single[0].token_ids == first[0].token_ids


def test_without_a_seed_a_fresh_one_is_reported_and_repeats(engine: Engine) -> None:
    params = SamplingParams(max_new_tokens=20, temperature=1.0)
    one, two = (run(engine, PROMPTS[:1], params)[0] for _ in range(2))
    assert one.seed != two.seed
    again = run(engine, PROMPTS[:1], SamplingParams(max_new_tokens=20, temperature=1.0, seed=one.seed))[0]
    assert again.token_ids == one.token_ids


def test_requests_join_and_leave_between_steps_and_wait_when_slots_are_full(engine: Engine) -> None:
    params = SamplingParams(max_new_tokens=12)
    want = [g.token_ids for g in run(engine, PROMPTS, params)]
    handles = [engine.submit(PROMPTS[0], params)]
    for prompt in PROMPTS[1:]:
        engine.step()
        handles.append(engine.submit(prompt, params))
    assert [h.result().token_ids for h in handles] == want
    many = [engine.submit(PROMPTS[i % 5], params) for i in range(11)]
    engine.step()
    assert len(engine.running) == 4 and len(engine.queue) == 7
    assert [h.result().token_ids for h in many] == [want[i % 5] for i in range(11)]
    assert engine.target.free_slots == 4


def test_each_request_has_its_own_method_in_one_batch(engine: Engine) -> None:
    params = SamplingParams(max_new_tokens=20)
    plain = run(engine, PROMPTS, params)
    fast = forced(plain, 1.0)
    handles = [engine.submit(p, params, fast if i % 2 else PLAIN) for i, p in enumerate(PROMPTS)]
    results = [h.result() for h in handles]
    assert [g.token_ids for g in results] == [g.token_ids for g in plain]
    assert [g.stats.mean_accepted > 1 for g in results] == [False, True, False, True, False]


def test_cancelling_keeps_what_was_said_and_frees_the_slot(engine: Engine) -> None:
    params = SamplingParams(max_new_tokens=30)
    want = run(engine, PROMPTS[:1], params)[0]
    handle = engine.submit(PROMPTS[0], params)
    waiting = [engine.submit(p, params) for p in PROMPTS]
    for _ in range(5):
        engine.step()
    handle.cancel()
    waiting[-1].cancel()
    result = handle.result()
    assert result.finish_reason is FinishReason.CANCELLED
    assert 3 < len(result.token_ids) < 6 and result.token_ids == want.token_ids[: len(result.token_ids)]
    assert result.text == _letters(result.token_ids)
    assert waiting[-1].result().token_ids == []
    assert waiting[0].result().token_ids == want.token_ids


def test_leaving_a_stream_early_cancels_it(engine: Engine) -> None:
    handle = engine.submit(PROMPTS[0], SamplingParams(max_new_tokens=50))
    pieces = handle.pieces()
    next(pieces)
    pieces.close()
    engine.step()
    assert handle.done and engine.target.free_slots == 4


def test_the_context_end_stops_like_plain_decoding(engine: Engine) -> None:
    params = SamplingParams(max_new_tokens=500)
    plain = run(engine, PROMPTS, params)
    assert {g.finish_reason for g in plain} == {FinishReason.CONTEXT}
    assert all(len(p) + len(g.token_ids) == engine.target.max_context for p, g in zip(PROMPTS, plain, strict=True))
    again = run(engine, PROMPTS, params, forced(plain, 0.9, 1, depth=16))
    assert [g.token_ids for g in again] == [g.token_ids for g in plain]


class Faulty(PromptLookup):
    """Fails at a chosen call, or proposes what it must not."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self.when, self.calls = when, 0

    def begin(self, slot, context) -> None:
        if self.when == "begin":
            raise RuntimeError("planted")
        super().begin(slot, context)

    def absorb(self, chunks) -> None:
        if self.when == "absorb":
            raise RuntimeError("planted")
        super().absorb(chunks)

    def propose(self, slots, budgets, noise):
        self.calls += 1
        if self.when == "propose" and self.calls > 3:
            raise RuntimeError("planted")
        if self.when == "vocabulary":
            return Proposals([chain(int(self._slots[s].context.tokens[-1]), [VOCAB]) for s in slots])
        if self.when == "budget":
            depths = [budget.depth + 1 for budget in budgets]
            pending = [int(self._slots[s].context.tokens[-1]) for s in slots]
            return Proposals([chain(token, [1] * depth) for token, depth in zip(pending, depths, strict=True)])
        if self.when == "pending":
            return Proposals([root(int(self._slots[s].context.tokens[-1] + 1) % VOCAB) for s in slots])
        return super().propose(slots, budgets, noise)

    def observe(self, slots, records) -> None:
        if self.when == "observe":
            raise RuntimeError("planted")
        super().observe(slots, records)

    def end(self, slot) -> None:
        super().end(slot)
        if self.when == "end":
            raise RuntimeError("planted")


@pytest.mark.parametrize("when", ["begin", "absorb", "propose", "observe", "end", "vocabulary", "budget", "pending"])
def test_a_failing_drafter_is_contained_logged_once_and_counted(model, when: str, caplog) -> None:
    params = SamplingParams(max_new_tokens=20)
    strict = Engine(eager_target(model, max_slots=4), PLAIN, strict=True)
    plain = run(Engine(eager_target(model, max_slots=4), PLAIN), PROMPTS, params)  # prompts known are not absorbed
    lenient = Engine(eager_target(model, max_slots=4), PLAIN)
    recipe = Recipe("faulty", Faulty(when), Invariant(), Fixed(Budget(6, 6)))
    results = run(lenient, PROMPTS, params, recipe)
    assert [g.token_ids for g in results] == [g.token_ids for g in plain]
    assert any(g.stats.drafter_failures for g in results)
    assert sum("going on without it" in r.message for r in caplog.records) == 1
    with pytest.raises((RuntimeError, OutriderError)):
        run(strict, PROMPTS, params, Recipe("faulty", Faulty(when), Invariant(), Fixed(Budget(6, 6))))
    assert strict.target.free_slots == 4  # a raised error leaves nothing behind


def test_an_impossible_request_fails_alone(engine: Engine) -> None:
    impossible = SamplingParams(max_new_tokens=9, bad_words=tuple((i,) for i in range(VOCAB)))
    good = engine.submit(PROMPTS[0], SamplingParams(max_new_tokens=9))
    bad = engine.submit(PROMPTS[1], impossible)
    assert len(good.result().token_ids) == 9
    with pytest.raises(EmptySupport):
        bad.result()


@pytest.mark.parametrize(
    ("prompt", "words"), [([], "empty"), ([1] * 96, "96"), ([VOCAB], "token ids"), ([-1], "token ids")]
)
def test_bad_prompts_are_refused_with_a_remedy(engine: Engine, prompt: list[int], words: str) -> None:
    with pytest.raises(InputError, match=words):
        engine.submit(prompt, SamplingParams())


def test_an_interrupt_leaves_partial_results_and_free_slots(engine: Engine) -> None:
    handle = engine.submit(PROMPTS[0], SamplingParams(max_new_tokens=30))
    for _ in range(4):
        engine.step()
    run_pass = engine.target.run
    engine.target.run = lambda *a, **k: (_ for _ in ()).throw(KeyboardInterrupt)  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.target.run = run_pass  # type: ignore[method-assign]
    assert handle.done and len(handle.result().token_ids) == 4
    assert engine.target.free_slots == 4
    assert len(run(engine, PROMPTS[:1], SamplingParams(max_new_tokens=5))[0].token_ids) == 5


def test_a_closed_engine_says_so(engine: Engine) -> None:
    handle = engine.submit(PROMPTS[0], SamplingParams())
    engine.step()
    engine.close()
    engine.close()
    assert handle.done and engine.target.free_slots == 4
    with pytest.raises(ClosedEngine):
        engine.submit(PROMPTS[0], SamplingParams())


def test_logprobs_come_from_the_targets_row_not_from_a_residual(engine: Engine, model) -> None:
    params = SamplingParams(max_new_tokens=12, temperature=0.8, top_k=9, seed=1, logprobs=3)
    plain = run(engine, PROMPTS, params)
    answers = {tuple(p): g.token_ids for p, g in zip(PROMPTS, plain, strict=True)}
    drafter = Forced(lambda c: answers[tuple(c.prompt)], VOCAB, 0.7, 1)
    for recipe in (PLAIN, Recipe("coupled", drafter, Recursive(), Fixed(Budget(9, 5)))):
        result = run(engine, PROMPTS[:1], params, recipe)[0]
        tokens = torch.tensor([PROMPTS[0] + result.token_ids])
        raw = torch.log_softmax(model(tokens).logits[0, len(PROMPTS[0]) - 1 : -1].detach(), -1)
        assert result.logprobs is not None and len(result.logprobs) == len(result.token_ids)
        for row, one, token in zip(raw, result.logprobs, result.token_ids, strict=True):
            assert one.token == token and one.raw == pytest.approx(float(row[token]), abs=1e-4)
            kept = torch.topk(row / 0.8, 9)
            logprobs = dict(zip(kept.indices.tolist(), torch.log_softmax(kept.values, 0).tolist(), strict=True))
            assert one.processed == pytest.approx(logprobs[token], abs=1e-4)
            assert [t[0] for t in one.top] == torch.topk(row, 3).indices.tolist()


def test_origins_say_who_brought_each_token(engine: Engine) -> None:
    params = SamplingParams(max_new_tokens=18)
    plain = run(engine, PROMPTS, params)
    assert all(o == ("", 0) for g in plain for o in g.origins)
    result = run(engine, PROMPTS, params, forced(plain, 1.0, depth=5))[0]
    assert [o.depth for o in result.origins] == [1, 2, 3, 4, 5, 0] * 3
    assert {o.drafter for o in result.origins if o.depth} == {"forced"}


def test_a_drafter_sees_the_scores_of_the_prefill_it_asked_for(engine: Engine, model) -> None:
    seen: list[tuple[int, list[int], tuple[int, ...]]] = []

    class Curious(PromptLookup):
        def absorb(self, chunks) -> None:
            for chunk in chunks:
                assert chunk.scores.logits is not None
                seen.append((chunk.start, list(chunk.tokens), tuple(chunk.scores.logits.argmax(-1).tolist())))

    drafter = Curious(needs=Needs(logits=True, hidden=(1,)))
    run(engine, PROMPTS[:1], SamplingParams(max_new_tokens=3), Recipe("x", drafter, Invariant(), Fixed(Budget(2, 2))))
    want = model(torch.tensor([PROMPTS[0][:-1]])).logits[0].argmax(-1).tolist()
    assert [t for _, tokens, _ in seen for t in tokens] == PROMPTS[0][:-1]
    assert [a for _, _, argmax in seen for a in argmax] == want
