"""The gate on a tiny random model: passes what is exact, refutes what is not, catches every planted bug."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from outrider import methods
from outrider.check import bugs, gate
from outrider.check.gate import Outcome, Size, check
from outrider.control.fixed import Fixed
from outrider.core.errors import UnknownName
from outrider.core.protocols import Noise, Recipe, Rows
from outrider.core.records import Budget, Verdict
from outrider.core.tree import Law, TokenTree
from outrider.draft.lookup.prompt_lookup import PromptLookup
from outrider.methods import MethodInfo
from outrider.models import LoadedModel
from outrider.runtime.slots import SlotTarget
from outrider.verify.rejection import Rejection

TINY = Size(3, 24, 20, 5, 16, 16, 60, 3, thorough=False)
RUNTIME_BUGS = {"leaked-sibling", "stale-cache", "off-by-one-position"}


@pytest.mark.usefixtures("small_enumeration")
@pytest.mark.parametrize(
    "method, options, coupled",
    [
        ("plain", {}, False),
        ("prompt-lookup", {}, False),
        ("prompt-lookup", {"verifier": "rejection"}, True),
        ("draft-model", {"layers": 1}, True),
        ("draft-model", {"layers": 1, "verifier": "recursive"}, True),
        ("draft-model", {"layers": 1, "verifier": "invariant"}, False),
    ],
    ids=str,
)
def test_exact_method_passes_and_every_planted_bug_is_caught(
    tiny_llama: LoadedModel, method: str, options: dict[str, Any], coupled: bool
) -> None:
    report = check(tiny_llama, method, options, bugs=bugs.named(bugs.ALL), size=TINY)
    assert report.verdict == "same output" and report.status == 0, [p.summary for p in report.parts]
    outcomes = {part.name: part.outcome for part in report.parts}
    seeded = Outcome.SKIPPED if coupled else Outcome.PASSED
    passed = Outcome.PASSED
    assert outcomes == {**dict.fromkeys(gate.PARTS, passed), "seeded": seeded}
    caught = {planted.bug.name: set(planted.caught_by) for planted in report.bugs}
    assert len(caught) == len(bugs.BUGS)
    for name in RUNTIME_BUGS:
        assert caught[name] == ({"greedy"} if coupled else {"greedy", "seeded"})
    assert caught["noise-by-step"] == {"dependent"}
    assert "martingale" in caught["reused-noise"] and ("seeded" in caught["reused-noise"]) != coupled
    if not coupled:
        assert caught["wrong-residual"] == set()
        assert next(p for p in report.bugs if p.bug.name == "wrong-residual").outcome == "cannot show"
    else:  # a chain of point masses never samples a draft, so only the enumeration has a residual to look at
        drafts = {"martingale"} if method == "draft-model" else set()
        assert caught["wrong-residual"] == {"exhaustive"} | drafts


@pytest.mark.usefixtures("small_enumeration")
@pytest.mark.parametrize(
    "parts, rule",
    [("draft-model,suffix", "invariant"), ("draft-model,suffix", "recursive"), ("draft-model", "traversal")],
)
def test_a_mixture_with_a_part_that_draws_is_exact(tiny_llama: LoadedModel, parts: str, rule: str) -> None:
    report = check(tiny_llama, "mix", {"parts": parts, "verifier": rule}, size=TINY)
    assert report.verdict == "same output", [part.summary for part in report.parts]
    parts_of = {part["name"]: part["evidence"] for part in report.as_dict()["parts"]}
    if rule == "invariant":
        assert max(run["mean_accepted"] for run in parts_of["seeded"]["runs"] if "forced" not in run["name"]) > 1
    else:
        assert parts_of["martingale"]["drafted"] > 100, "draws were tested, not plain decoding"


@pytest.mark.usefixtures("small_enumeration")
def test_a_proof_without_candidates_says_that_it_is_vacuous(tiny_llama: LoadedModel) -> None:
    report = check(tiny_llama, "retrieval", size=TINY)  # no store: it never proposes
    parts = {part.name: part for part in report.parts}
    assert report.verdict == "same output" and parts["martingale"].outcome is Outcome.VACUOUS
    assert "proposed nothing" in parts["martingale"].summary and "proposed nothing" in parts["greedy"].summary
    assert "but not its drafting; give it what it needs (a corpus (outrider index build))" in report.hint
    assert report.as_dict()["hint"] == report.hint and report.as_dict()["parts"][-1]["proposed"] == 0


@pytest.mark.usefixtures("small_enumeration")
def test_a_summary_tells_how_many_candidates_were_put_to_the_test(tiny_llama: LoadedModel) -> None:
    def summaries(rule: str) -> dict[str, str]:
        report = check(tiny_llama, "prompt-lookup", {"verifier": rule}, size=TINY)
        assert not report.hint and min(part.proposed for part in report.parts if part.proposed is not None) > 0
        return {part.name: part.summary for part in report.parts}

    invariant, coupled = summaries("invariant"), summaries("rejection")
    assert "candidates of the method's own and" in invariant["greedy"] and "in forced trees" in invariant["seeded"]
    assert "candidates stood at" in invariant["martingale"] and "see exhaustive and seeded" in invariant["martingale"]
    assert "all chosen and none drawn" in coupled["martingale"] and "see exhaustive" in coupled["martingale"]


@pytest.mark.usefixtures("small_enumeration")
@pytest.mark.parametrize("runtime", ["eager", "openvino", "native"])
def test_bugs_are_planted_in_the_runtime_under_test(tiny_llama: LoadedModel, runtime: str) -> None:
    planted = [bug for bug in bugs.named(bugs.ALL) if bug.name in RUNTIME_BUGS]
    report = check(tiny_llama, "prompt-lookup", bugs=planted, size=TINY, runtime=runtime)
    assert report.settings["runtime"] == runtime
    assert {p.bug.name: p.outcome for p in report.bugs} == dict.fromkeys(RUNTIME_BUGS, "caught")


@pytest.mark.usefixtures("small_enumeration")
def test_evidence_is_complete(tiny_llama: LoadedModel) -> None:
    told: set[str] = set()
    report = check(tiny_llama, "draft-model", {"layers": 1}, size=TINY, watch=lambda label, _: told.add(label))
    assert {label.partition(": ")[0] for label in told} == set(gate.PROVES) - {"seeded"}
    assert all(gate.proved(label).startswith(tuple(gate.PROVES.values())) for label in told)
    parts = {part["name"]: part["evidence"] for part in report.as_dict()["parts"]}
    greedy, martingale = parts["greedy"], parts["martingale"]
    assert sum(b["positions"] for b in greedy["margin_histogram"]) == greedy["positions"] == TINY.prompts * TINY.tokens
    assert greedy["noise"]["rescored"] == greedy["positions"] * len(greedy["noise"]["widths"])
    assert 0 < greedy["noise"]["largest"] < 1e-3
    accepted = {run["name"]: run["mean_accepted"] for run in greedy["runs"]}
    assert accepted["forced accept-all trees"] > 4 and accepted["forced accept-none trees"] == 1
    assert 1.3 < accepted["forced random-accept trees"] < accepted["forced accept-all trees"]
    assert martingale["power_against_wrong_residual"] > 0.99
    names = {s["name"] for s in martingale["statistics"]}
    assert {"first draft accepted", "log q/p", "min(1, q/p)", "log p", "quantile, repeating"} <= names
    assert parts["exhaustive"]["outcomes"] > 0 and not parts["exhaustive"]["failures"]
    assert [found["method"] for found in parts["dependent"]["methods"]] == ["prompt-lookup", "draft-model"]
    assert all(found["outcomes"] > 0 and found["difference"] < 1e-9 for found in parts["dependent"]["methods"])
    assert report.settings["seed"] == 1 and report.settings["verifier"] == "rejection"


@dataclass(frozen=True)
class _NoOptions:
    pass


class _Typical:
    """Accepts whatever the target finds likely enough: fast, and another distribution."""

    name, honours, coupled = "typical", frozenset(Law), True

    def verify(self, tree: TokenTree, rows: Rows, noise: Noise) -> Verdict:
        node, path = 0, []
        while (children := tree.children(node)) and float(rows.probs(node)[tree.tokens[children[0]]]) > 0.02:
            node = children[0]
            path.append(node)
        return Verdict(tuple(path), rows.argmax(node) if rows.greedy else noise.draw(rows.probs(node), node, 0))


@pytest.mark.usefixtures("small_enumeration")
def test_lossy_acceptance_is_refuted(tiny_llama: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(parts: methods.Parts, options: _NoOptions) -> Recipe:
        return Recipe("typical", PromptLookup(), _Typical(), Fixed(Budget(4, 4)))

    info = MethodInfo("typical", "", "-", "test", False, "nothing", _NoOptions, build)
    methods.table()  # loaded first, or it would not be added to
    monkeypatch.setitem(methods.registry._METHODS, "typical", info)
    report = check(tiny_llama, "typical", size=replace(TINY, sampled=48))  # at 16 texts |z| is about 5, and 4.2 refutes
    refuted = {part.name for part in report.parts if part.outcome is Outcome.REFUTED}
    assert {"exhaustive", "martingale"} <= refuted
    assert report.verdict == "refuted" and report.status == 1


@pytest.mark.usefixtures("small_enumeration")
def test_bug_that_nothing_notices_is_a_failure(tiny_llama: LoadedModel) -> None:
    harmless = bugs.Bug("harmless", "changes nothing", ("greedy",), lambda recipe, target: (gate, "QUICK", gate.QUICK))
    report = check(tiny_llama, "plain", bugs=[harmless], size=TINY)
    assert [part.name for part in report.parts] == ["greedy"]  # only what the bug concerns, and clean first
    assert report.bugs[0].outcome == "missed" and report.status == 1


@pytest.mark.usefixtures("small_enumeration")
def test_interrupt_keeps_the_evidence_so_far(tiny_llama: LoadedModel) -> None:
    def interrupt(label: str, tokens: int) -> None:
        if label.startswith("greedy: forced drafter, random"):
            raise KeyboardInterrupt

    report = check(tiny_llama, "prompt-lookup", size=TINY, watch=interrupt)
    assert report.status == 130 and report.verdict == "incomplete"
    assert [(p.name, p.outcome) for p in report.parts] == [
        ("exhaustive", Outcome.PASSED),
        ("dependent", Outcome.PASSED),
        ("greedy", Outcome.INCOMPLETE),
    ]
    runs = [run["name"] for run in report.parts[-1].as_dict()["evidence"]["runs"]]
    assert runs[-1] == "forced accept-all trees"


def test_bugs_are_taken_out_again() -> None:
    recipe = Recipe("x", None, Rejection(), Fixed(Budget(0, 0)))
    target = object.__new__(SlotTarget)
    for bug in bugs.named(bugs.ALL):
        owner, name, _ = bug.place(recipe, target)
        right, defined = getattr(owner, name), name in vars(owner)
        with pytest.raises(ZeroDivisionError), bug.planted(recipe, target):
            assert getattr(owner, name) is not right
            raise ZeroDivisionError
        assert getattr(owner, name) is right and (name in vars(owner)) == defined


def test_unknown_bug_lists_the_known_ones() -> None:
    with pytest.raises(UnknownName, match="leaked-sibling"):
        bugs.named("gremlin")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["prompt-lookup", "draft-model"])
def test_quick_gate_on_the_embedded_model(smollm2: LoadedModel, method: str) -> None:
    report = check(smollm2, method, bugs=bugs.named(bugs.ALL), size=gate.QUICK)
    assert report.status == 0, [part.summary for part in report.parts]
    assert {planted.outcome for planted in report.bugs} <= {"caught", "cannot show"}
