"""Planted timings must come out as planted, and everything that could mislead a reader must be said."""

from __future__ import annotations

import json
import math
from collections import Counter

import numpy as np
import pytest

from outrider.bench.compare import Plan, batches, compare, order, per_group
from outrider.bench.contenders import Contender, Run, parse_specs
from outrider.bench.figures import interval, median_ratio, pooled_ratio, result
from outrider.core.errors import InputError, UnknownName
from outrider.core.generation import Stats
from outrider.core.params import SamplingParams
from outrider.store.prompts import Prompt
from tests.bench.stage import PREFILL_S, VERIFY_S, Coupled, Gullible, SlowController, Stage

PROMPTS = [Prompt("one", ("aab",), category="qa"), Prompt("two", ("cde",), category="rag")]
TEN = SamplingParams(max_new_tokens=10)


def measured(stage: Stage, contenders: list[Contender], prompts: list[Prompt] = PROMPTS, **plan: object) -> dict:
    made = Plan(**{"params": TEN} | plan)  # type: ignore[arg-type]
    return result(compare(stage, prompts, contenders, made))  # type: ignore[arg-type]


def test_a_planted_double_speed_comes_out_as_two(stage: Stage) -> None:
    out = measured(stage, [stage.contender("plain"), stage.contender("fast", stage.forced(width=1))])
    plain, fast = out["methods"]
    assert plain["speedup"] == 1.0 and plain["tokens_per_s"] == pytest.approx(1 / VERIFY_S)
    for figures in (fast, *fast["groups"].values()):
        assert figures["speedup"] == pytest.approx(2.0)
        assert figures["speedup_median"] == pytest.approx(2.0)
        assert figures["mean_accepted"] == pytest.approx(2.0)
        assert figures["efficiency"] == pytest.approx(1.0)
        assert figures["acceptance_by_depth"] == [1.0]
    assert fast["tokens_per_s"] == pytest.approx(2 / VERIFY_S)
    assert fast["speedup_interval"] == pytest.approx([2.0, 2.0])
    assert list(fast["groups"]) == ["qa", "rag"]


def test_the_prefill_is_no_part_of_the_speed_but_of_the_first_token(stage: Stage) -> None:
    plain, fast = measured(stage, [stage.contender("plain"), stage.contender("fast", stage.forced())])["methods"]
    assert plain["ttft_ms"] == fast["ttft_ms"] == pytest.approx(1e3 * (PREFILL_S + VERIFY_S))
    assert plain["decode_s"] == pytest.approx(2 * 10 * VERIFY_S)
    assert fast["speedup_total"] == pytest.approx((PREFILL_S + 10) / (PREFILL_S + 5))


def test_steps_are_made_ready_for_the_lengths_that_the_texts_reach(stage: Stage) -> None:
    measured(stage, [stage.contender("plain")])
    lengths = [len(stage.encode_chat(prompt.conversation(()))) for prompt in PROMPTS]
    assert stage.prepared == [length + TEN.max_new_tokens for length in lengths]


def test_time_that_a_controller_takes_between_steps_counts(stage: Stage) -> None:
    slow = SlowController(stage.forced().controller.budget, clock=stage.clock, seconds=1.0)  # type: ignore[attr-defined]
    _, fast = measured(stage, [stage.contender("plain"), stage.contender("fast", stage.forced(controller=slow))])[
        "methods"
    ]
    assert fast["speedup"] == pytest.approx(1.0) and fast["efficiency"] == pytest.approx(0.5)
    assert fast["host_ms_per_step"] == pytest.approx(1e3)
    assert fast["rest_share"] == pytest.approx(0.5) and fast["verify_share"] == pytest.approx(0.5)


def test_a_batch_counts_its_time_once(stage: Stage) -> None:
    prompts = [Prompt(str(i), (text,)) for i, text in enumerate(("ab", "cd", "ea"))]
    contenders = [stage.contender("plain"), stage.contender("fast", stage.forced(width=1))]
    plain, fast = measured(stage, contenders, prompts, batch=3)["methods"]
    assert plain["tokens_per_s"] == pytest.approx(3 / VERIFY_S)
    assert plain["verify_share"] == pytest.approx(1.0)
    assert fast["speedup"] == pytest.approx(2.0) and fast["mean_accepted"] == pytest.approx(2.0)


def test_each_contender_takes_each_place_equally_often(stage: Stage) -> None:
    labels = ["plain", "b", "c"]
    prompts = [Prompt(str(i), ("ab",)) for i in range(6)]
    out = measured(stage, [stage.contender(label) for label in labels], prompts)
    orders = [[run["method"] for run in unit["runs"]] for unit in out["units"]]
    for place in range(3):
        assert Counter(o[place] for o in orders) == dict.fromkeys(labels, 2)
    assert len({tuple(o) for o in orders}) == 6  # both directions of each rotation: everyone follows everyone
    assert order(labels, 0) == labels


def test_what_a_contender_learnt_is_forgotten_after_warm_up_and_each_round(stage: Stage) -> None:
    begun: list[str] = []
    out = measured(stage, [stage.contender("plain"), stage.contender("b", begun=begun.append)], rounds=2)
    assert begun == ["b"] * 3
    assert [unit["round"] for unit in out["units"]] == [0, 0, 1, 1]
    assert out["methods"][0]["answers"] == 4  # the warm-up is not among them


def test_identical_is_true_for_a_lossless_method(stage: Stage) -> None:
    contenders = [stage.contender("plain"), stage.contender("half", stage.forced(accept=0.5, width=3))]
    for params in (TEN, TEN.with_(temperature=0.8)):
        half = measured(stage, contenders, params=params)["methods"][1]
        assert half["identical"] is True and half["different"] == 0 and half["first_differences"] == []


def test_identical_is_false_for_a_broken_rule_with_the_margin_at_the_first_difference(stage: Stage) -> None:
    broken = stage.forced(accept=0.0, verifier=Gullible())
    out = measured(stage, [stage.contender("plain"), stage.contender("broken", broken)])
    method = out["methods"][1]
    assert method["identical"] is False and method["different"] == 2
    first = method["first_differences"][0]
    p = sorted(stage.lm.probs(stage.encode("uaab")))
    assert first["id"] == "one" and first["position"] == 0
    assert first["gap"] == pytest.approx(math.log(p[-1] / p[-2]), rel=1e-4)


def test_identical_is_null_for_a_coupled_rule_that_samples(stage: Stage) -> None:
    contenders = [stage.contender("plain"), stage.contender("coupled", stage.forced(verifier=Coupled()))]
    sampled = measured(stage, contenders, params=TEN.with_(temperature=0.8))["methods"]
    assert sampled[1]["identical"] is None and sampled[1]["different"] is None
    assert sampled[0]["identical"] is True
    assert measured(stage, contenders)["methods"][1]["identical"] is True  # greedy decoding has one right answer


def test_a_later_turn_follows_plains_answer_whatever_the_others_said(stage: Stage) -> None:
    broken = stage.forced(accept=0.0, verifier=Gullible())
    prompts = [Prompt("talk", ("ab", "cd", "e"))]
    comparison = compare(
        stage, prompts, [stage.contender("plain"), stage.contender("broken", broken)], Plan(TEN)  # type: ignore[arg-type]
    )  # fmt: skip
    assert [unit.turn for unit in comparison.units] == [0, 1, 2]
    answers = [unit.runs["plain"].texts[0] for unit in comparison.units]
    assert answers[0] != comparison.units[0].runs["broken"].texts[0]
    assert [m["content"] for m in stage.asked[-1]] == ["ab", answers[0], "cd", answers[1], "e"]
    assert comparison.units[2].prompts[0] == stage.encode("uab" + f"a{answers[0]}" + "ucd" + f"a{answers[1]}" + "ue")


def test_a_turn_that_outgrew_the_context_is_left_out_and_said() -> None:
    stage = Stage(max_context=20)
    out = measured(stage, [stage.contender("plain")], [Prompt("talk", ("abc", "abcdefgh"))])
    assert out["skipped"] == [{"id": "talk", "turn": 1, "round": 0, "tokens": 24}]
    assert len(out["units"]) == 1 and out["complete"]


def test_an_interrupt_keeps_what_everyone_had_answered(stage: Stage) -> None:
    calls = 0

    def begin() -> object:
        def run(prompts: list[list[int]], params: SamplingParams) -> Run:
            nonlocal calls
            calls += 1
            if calls == 3:  # warm-up, the first prompt, then this
                raise KeyboardInterrupt
            return plain(prompts, params)

        plain = stage.contender("plain").begin()
        return run

    out = measured(stage, [stage.contender("plain"), Contender("second", "plain", begin)])  # type: ignore[arg-type]
    assert out["complete"] is False
    assert [unit["ids"] for unit in out["units"]] == [["one"]]
    assert out["methods"][1]["answers"] == 1 and json.dumps(out)


def test_an_interrupt_before_the_first_answer_gives_no_figures_and_no_error(stage: Stage) -> None:
    def begin() -> object:
        raise KeyboardInterrupt

    out = measured(stage, [stage.contender("plain"), Contender("b", "b", begin)])  # type: ignore[arg-type]
    assert out["complete"] is False and out["units"] == []
    assert all(m["speedup"] is None and m["identical"] is None and m["ttft_ms"] is None for m in out["methods"])


def test_batches_hold_one_group_each() -> None:
    prompts = [Prompt(str(i), ("x",), category="qa" if i % 2 else "rag") for i in range(6)]
    assert [[p.id for p in batch] for batch in batches(prompts, 2)] == [["0", "2"], ["1", "3"], ["4"], ["5"]]
    assert [p.id for p in per_group(prompts, 1)] == ["0", "1"]
    with pytest.raises(InputError, match="limit of 0"):
        per_group(prompts, 0)


def test_pooled_and_median_speedups_of_planted_cases() -> None:
    # 10 tokens each; plain takes 10 s a case, the method 5, 10 and 20 s: case speed-ups 2, 1 and 0.5
    sums = np.array([[10, 10, 10], [5, 10, 20], [10, 10, 10], [10, 10, 10]], dtype=float)
    assert float(median_ratio(sums)) == 1.0
    assert float(pooled_ratio(sums)) == pytest.approx(30 / 35)
    low, high = interval(pooled_ratio, sums) or (0, 0)
    assert low == pytest.approx(0.5) and high == pytest.approx(2.0)  # three cases can be drawn thrice
    assert interval(pooled_ratio, sums[:, :1]) is None


def test_decode_time_of_another_runtime_counts_the_tokens_it_made(stage: Stage) -> None:
    """A runtime whose prefill brings the first token has one token less to decode."""

    def begin() -> object:
        stats = Stats(new_tokens=11, steps=11, verify_s=5.0, first_token_s=1.0)
        return lambda prompts, params: Run(((0,) * 11,), ("",), stats, 11, 6.0, decoded=10, comparable=False)

    other = measured(stage, [stage.contender("plain"), Contender("other", "other", begin)])["methods"][1]  # type: ignore
    assert other["tokens_per_s"] == pytest.approx(2.0) and other["speedup"] == pytest.approx(2.0)
    assert other["identical"] is None


def test_methods_are_parsed_with_plain_first_and_options_by_label() -> None:
    specs = parse_specs("prompt-lookup, wide=prompt-lookup", {"wide.budget": 32})
    assert [(s.label, s.method, s.options) for s in specs] == [
        ("plain", "plain", {}), ("prompt-lookup", "prompt-lookup", {}), ("wide", "prompt-lookup", {"budget": 32})
    ]  # fmt: skip
    assert [s.label for s in parse_specs("prompt-lookup,plain")] == ["plain", "prompt-lookup"]


@pytest.mark.parametrize(
    ("names", "options", "error", "message"),
    [
        ("", {}, InputError, "names no method"),
        ("plain,nonsense", {}, UnknownName, "known methods"),
        ("plain,plain", {}, InputError, "twice"),
        ("plain=prompt-lookup", {}, InputError, "baseline"),
        ("prompt-lookup", {"budget": 3}, InputError, "whose it is"),
        ("prompt-lookup", {"draft-model.budget": 3}, UnknownName, "not compared"),
        ("prompt-lookup", {"prompt-lookup.nonsense": 3}, UnknownName, "nonsense"),
        ("prompt-lookup", {"prompt-lookup.budget": "many"}, InputError, "many"),
    ],
)
def test_a_bad_method_list_is_refused_with_the_remedy(
    names: str, options: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        parse_specs(names, options)


@pytest.mark.parametrize(
    ("plan", "message"),
    [({"rounds": 0}, "rounds is 0"), ({"batch": 0}, "batch is 0"), ({"params": SamplingParams(n=2)}, "one sample"),
     ({"batch": 9}, "does not fit 4 slots")],
)  # fmt: skip
def test_a_bad_plan_is_refused_with_the_remedy(stage: Stage, plan: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        measured(stage, [stage.contender("plain")], **plan)


def test_a_prompt_longer_than_the_context_is_named_before_anything_runs(stage: Stage) -> None:
    with pytest.raises(InputError, match="prompt huge has 301 tokens"):
        measured(stage, [stage.contender("plain")], [*PROMPTS, Prompt("huge", ("a" * 300,))])
    assert stage.target.forwards == 0


def test_a_model_without_a_chat_template_needs_raw(stage: Stage) -> None:
    stage.tokenizer.chat_template = None
    with pytest.raises(InputError, match="--raw"):
        measured(stage, [stage.contender("plain")])
    assert measured(stage, [stage.contender("plain")], raw=True)["settings"]["raw"] is True


def test_a_sampled_comparison_without_a_seed_takes_one_for_all_and_reports_it(stage: Stage) -> None:
    contenders = [stage.contender("plain"), stage.contender("again")]
    out = measured(stage, contenders, params=TEN.with_(temperature=1.0))
    assert isinstance(out["settings"]["seed"], int) and out["methods"][1]["identical"] is True
