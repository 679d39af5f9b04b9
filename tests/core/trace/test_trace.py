"""The record of every step: it adds up to the text, agrees with the statistics, changes nothing, and stays small."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.control.fixed import Fixed
from outrider.core.engine import Engine
from outrider.core.errors import InputError
from outrider.core.generation import Generation
from outrider.core.protocols import Recipe
from outrider.core.records import Budget
from outrider.core.sampling import SamplingParams
from outrider.core.schedule import Terms
from outrider.core.trace.trace import NODE_BYTES, STEP_BYTES, Reason, Trace
from outrider.draft.forced import Forced
from outrider.runtime.targets import eager_target
from outrider.verify.invariant import Invariant

VOCAB = 61
PROMPTS = [[1, 2, 3, 4, 5], [11, 12, 11, 12, 11, 12]]
PLAIN = Recipe("plain", None, Invariant(), Fixed(Budget(0, 0)))
GREEDY = SamplingParams(max_new_tokens=24, ignore_eos=True, seed=4, trace=True)
SAMPLED = GREEDY.with_(temperature=1.3, top_k=20)
BOTH = pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])


class Curve:
    """A cost model that knows everything: a millisecond, and a tenth for each candidate."""

    def add(self, rows: int, batch: int, seconds: float, context: int) -> None: ...

    def seconds(self, batch: int, candidates: int, context: int) -> np.ndarray:
        return 1e-3 + 1e-4 * np.arange(candidates + 1)


class Broken:
    name, shared_noise = "broken", False
    needs = Forced(lambda _: [], VOCAB, 0.5).needs

    def begin(self, slot, context): ...
    def absorb(self, chunks): ...
    def observe(self, slots, records): ...
    def end(self, slot): ...
    def propose(self, slots, budgets, noise):
        raise RuntimeError("planted")


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=96, initializer_range=0.4, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def run(model: LlamaForCausalLM, params: SamplingParams, recipe: Recipe = PLAIN) -> list[Generation]:
    engine = Engine(eager_target(model, max_slots=4), PLAIN)
    return [g for h in [engine.submit(p, params, recipe) for p in PROMPTS] for g in h.results()]


def drafting(plain: list[Generation], accept: float = 0.7, decoys: int = 2) -> Recipe:
    answers = {tuple(p): g.token_ids for p, g in zip(PROMPTS, plain, strict=True)}
    drafter = Forced(lambda context: answers[tuple(context.prompt)], VOCAB, accept, decoys)
    return Recipe("forced", drafter, Invariant(), Fixed(Budget(24, 6)), costs=Curve())


def traced(generation: Generation) -> dict:
    assert generation.trace is not None
    return json.loads(json.dumps(generation.trace.as_dict()))  # as a client gets it


@BOTH
def test_the_steps_add_up_to_the_text_and_its_origins(model: LlamaForCausalLM, params: SamplingParams) -> None:
    for generation in run(model, params, drafting(run(model, params))):
        trace, tokens, origins = traced(generation), [], []
        for step in trace["steps"]:
            assert step["first"] == len(tokens)
            tokens += step["emitted"]
            path = step["path"][: len(step["emitted"])]
            tree = step["tree"]
            assert [tree["tokens"][node] for node in path] == step["emitted"][: len(path)]
            assert [tree["parents"][node] for node in path] == [0, *path][: len(path)]
            origins += [(trace["drafters"][tree["drafters"][node]], tree["depths"][node]) for node in path]
            origins += [("", 0)] * (len(step["emitted"]) - len(path))
        assert tokens == generation.token_ids
        assert origins == [tuple(origin) for origin in generation.origins]
        assert trace["left_out"] == 0


@BOTH
def test_the_counts_and_seconds_are_those_of_the_statistics(model: LlamaForCausalLM, params: SamplingParams) -> None:
    for generation in run(model, params, drafting(run(model, params))):
        steps, stats = traced(generation)["steps"], generation.stats
        assert len(steps) == stats.steps
        assert sum(step["budget"]["verified"] for step in steps) == stats.drafted > 0
        assert sum(len(step["path"][: len(step["emitted"])]) for step in steps) == stats.accepted > 0
        for name in ("draft_s", "verify_s"):
            assert math.isclose(sum(step[name] for step in steps), getattr(stats, name), abs_tol=1e-5)
        assert math.isclose(sum(step["host_s"] for step in steps), stats.rest_s, abs_tol=1e-5)
        ends = [step["ended_s"] for step in steps]
        assert ends == sorted(ends)


@BOTH
def test_a_trace_changes_no_token_and_is_not_there_unless_asked_for(
    model: LlamaForCausalLM, params: SamplingParams
) -> None:
    recipe = drafting(run(model, params))
    seen, unseen = run(model, params, recipe), run(model, params.with_(trace=False), recipe)
    assert [g.token_ids for g in seen] == [g.token_ids for g in unseen]
    assert all(g.trace is None and "trace" not in g.as_dict() for g in unseen)


@BOTH
def test_probabilities_are_those_of_the_model(model: LlamaForCausalLM, params: SamplingParams) -> None:
    """Against the log-probabilities that the engine reports for what it emitted."""
    asked = params.with_(logprobs=0)
    for generation in run(model, asked, drafting(run(model, asked))):
        given = [p for step in traced(generation)["steps"] for p in step["probability"]]
        assert generation.logprobs is not None
        expected = [math.exp(one.processed) for one in generation.logprobs]
        assert np.allclose(given, expected, atol=2e-6)


def test_a_rejected_candidate_has_a_probability_where_the_verifier_came_past_it(model: LlamaForCausalLM) -> None:
    (generation, _) = run(model, GREEDY, drafting(run(model, GREEDY), accept=0.4))
    passed = 0
    for step in traced(generation)["steps"]:
        walked, tree = {0, *step["path"]}, step["tree"]
        for node in range(1, len(tree["tokens"])):
            known = tree["probability"][node] is not None
            assert known == (tree["parents"][node] in walked)
            passed += known and node not in walked
            if known and node not in walked:  # the target preferred another token there
                assert tree["probability"][node] <= 0.5
    assert passed


def test_each_step_says_why_it_had_its_candidates(model: LlamaForCausalLM) -> None:
    plain = run(model, GREEDY)
    assert {s["budget"]["reason"] for s in traced(plain[0])["steps"]} == {Reason.PLAIN}
    steps = traced(run(model, GREEDY, drafting(plain))[0])["steps"]
    assert Reason.ALL in {s["budget"]["reason"] for s in steps}
    last = [s for s in steps if s["budget"]["room_depth"] < 1]
    assert all(s["budget"]["reason"] == Reason.NO_ROOM for s in last)
    nothing = Recipe("none", Forced(lambda _: [], VOCAB, 1.0), Invariant(), Fixed(Budget(24, 6)))
    assert Reason.NOTHING_OFFERED in {s["budget"]["reason"] for s in traced(run(model, GREEDY, nothing)[0])["steps"]}
    rests = Recipe("rests", Forced(lambda _: [], VOCAB, 1.0), Invariant(), Fixed(Budget(0, 0)))
    assert traced(run(model, GREEDY, rests)[0])["steps"][0]["budget"]["reason"] == Reason.RESTS
    failed = Recipe("broken", Broken(), Invariant(), Fixed(Budget(24, 6)))
    assert traced(run(model, GREEDY, failed)[0])["steps"][1]["budget"]["reason"] == Reason.FAILED


def test_the_cost_model_s_word_stands_beside_what_a_step_took(model: LlamaForCausalLM) -> None:
    trace = traced(run(model, GREEDY, drafting(run(model, GREEDY)))[0])
    assert trace["curves"] and trace["curves"][0]["first"] == 0
    for step in trace["steps"]:
        assert step["floor_s"] == pytest.approx(1e-3)
        assert step["expected_s"] == pytest.approx(1e-3 + 1e-4 * (step["rows"] - step["batch"]))
    without = traced(run(model, GREEDY)[0])
    assert without["curves"] == [] and without["steps"][0]["floor_s"] is None


def test_a_trace_stays_within_its_bytes_and_says_what_it_left_out(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 4 * STEP_BYTES
    monkeypatch.setattr("outrider.core.sequence.Trace", lambda: Trace(limit))
    (generation, _) = run(model, GREEDY)
    trace = traced(generation)
    assert generation.trace is not None and generation.trace.bytes <= limit + STEP_BYTES + NODE_BYTES
    assert 0 < len(trace["steps"]) < generation.stats.steps
    assert trace["left_out"] == generation.stats.steps - len(trace["steps"])


def test_probabilities_that_wait_on_a_device_come_to_the_host_together(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def settled_late(self: Trace, tree, verdict, rows) -> None:
        settle = monkeypatch.context()
        with settle as patch:
            patch.setattr(Trace, "_settle", lambda _: None)
            judge(self, tree, verdict, rows)

    expected = traced(run(model, GREEDY, drafting(run(model, GREEDY)))[0])
    judge = Trace.judge
    monkeypatch.setattr(Trace, "judge", settled_late)
    late = traced(run(model, GREEDY, drafting(run(model, GREEDY)))[0])
    assert [s["probability"] for s in late["steps"]] == [s["probability"] for s in expected["steps"]]


def test_a_trace_is_asked_for_with_true_or_false() -> None:
    with pytest.raises(InputError, match="trace='yes': use True or False"):
        SamplingParams(trace="yes")  # type: ignore[arg-type]


def test_a_resumed_text_has_its_steps_where_they_stand_in_the_whole_text(model: LlamaForCausalLM) -> None:
    engine, recipe = Engine(eager_target(model, max_slots=4), PLAIN), drafting(run(model, GREEDY))
    (whole, _) = run(model, GREEDY, recipe)
    handle = engine.submit(PROMPTS[0], GREEDY, recipe, terms=Terms(resume_from=whole.token_ids[:7]))
    resumed = handle.result()
    assert resumed.token_ids == whole.token_ids
    steps = traced(resumed)["steps"]
    assert steps[0]["first"] == 7 and [token for s in steps for token in s["emitted"]] == whole.token_ids[7:]


@BOTH
def test_acceptance_by_drafter_and_depth_is_what_the_trees_say(model: LlamaForCausalLM, params: SamplingParams) -> None:
    for generation in run(model, params, drafting(run(model, params))):
        expected: dict[tuple[str, int], list[int]] = {}
        trace = traced(generation)
        for step in trace["steps"]:
            tree, path = step["tree"], step["path"][: len(step["emitted"])]
            for depth, above in enumerate([0, *path], 1):
                children = [node for node, parent in enumerate(tree["parents"]) if parent == above]
                for name in {trace["drafters"][tree["drafters"][node]] for node in children}:
                    pair = expected.setdefault((name, depth), [0, 0])
                    pair[0] += 1
                    pair[1] += depth <= len(path)  # only one drafter here
        found = {(name, depth): pair for name, rows in generation.stats.by_drafter.items()
                 for depth, pair in enumerate(rows, 1)}  # fmt: skip
        assert found == expected and sum(pair[1] for pair in found.values()) == generation.stats.accepted
