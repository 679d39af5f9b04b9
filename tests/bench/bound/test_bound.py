"""`outrider bound`: figures are those of the real rules, enumerated; the optimum is the linear program's; the text is
plain decoding's own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

import outrider
from outrider.bench.bound import report as bound_report
from outrider.bench.bound.bound import DRAFTS, Plan, bound
from outrider.bench.bound.figures import mean, result
from outrider.bench.bound.reach import OPTIMUM, RULES, SAMPLED, SCHEMES, chain_tokens, hits, part_of, tree_tokens
from outrider.check.drawings import DRAWINGS, draw_tree
from outrider.check.enumeration import Branches, branches
from outrider.check.exhaustive import CONTEXT
from outrider.check.toy import TableRows, ToyLM
from outrider.cli import app
from outrider.core.errors import InputError
from outrider.core.params import SamplingParams
from outrider.core.protocols import Verifier
from outrider.core.tree import Law, TokenTree, merge
from outrider.methods.common import verifier
from outrider.store.prompts import Prompt
from outrider.verify.transport import transport_acceptance

WAYS = {drawing.name: drawing for drawing in DRAWINGS}
DRAWN = {
    Law.IID: "iid", Law.WITHOUT_REPLACEMENT: "without replacement", Law.TOP_PLUS_ONE: "top plus one",
    Law.FIXED: "fixed",
}  # fmt: skip
pairs = st.builds(
    lambda vocab, seed, zeros, concentration: (
        ToyLM(vocab, seed, zeros=zeros / 2, concentration=concentration),
        ToyLM(vocab, seed + 1, zeros=zeros, concentration=concentration),
    ),
    vocab=st.integers(2, 4),
    seed=st.integers(0, 2**32),
    zeros=st.sampled_from([0.0, 0.4]),
    concentration=st.sampled_from([0.2, 1.0, 5.0]),
)


def every_tree(scheme: Law, shape: tuple[int, ...], draft: ToyLM) -> Iterator[tuple[TokenTree, float]]:
    def draw(paths: Branches) -> TokenTree:
        return draw_tree(WAYS[DRAWN[scheme]], shape, draft, draft, CONTEXT, paths.noise("draft"))

    return branches(draw, 200_000)


def said(rule: Verifier, tree: TokenTree, target: ToyLM) -> float:
    """Expected tokens of a step, from every outcome of the rule itself."""

    def one(paths: Branches) -> int:
        verdict = rule.verify(tree, TableRows(target, CONTEXT, tree), paths.noise("verify"))
        return len(verdict.path) + 1

    return sum(count * chance for count, chance in branches(one, 200_000))


def reached(models: tuple[ToyLM, ToyLM], k: int, scheme: Law, sequences: int = 1) -> dict[str, np.ndarray]:
    target, draft = models
    p = torch.tensor(target.probs(CONTEXT), dtype=torch.float64)
    return hits(p, draft.row(CONTEXT), k, scheme, np.random.default_rng(7), sequences)


def enumerated(models: tuple[ToyLM, ToyLM], k: int, scheme: Law, rule: str) -> float:
    target, draft = models
    drawn = every_tree(scheme, (k,), draft)
    return sum(weight * (said(verifier(rule), tree, target) - 1) for tree, weight in drawn)


@given(models=pairs, k=st.integers(1, 3))
@settings(max_examples=25, deadline=None)
def test_closed_forms_are_what_the_rules_do_and_the_optimum_is_the_linear_programs(
    models: tuple[ToyLM, ToyLM], k: int
) -> None:
    target, draft = models
    for scheme in SCHEMES:
        found = reached(models, k, scheme)
        if scheme is not Law.FIXED:
            best = transport_acceptance(target.probs(CONTEXT), draft.row(CONTEXT), k, scheme)
            assert found[OPTIMUM][-1] == pytest.approx(best, abs=1e-6)
        for rule in RULES[scheme]:
            assert (found[rule] <= found[OPTIMUM] + 1e-9).all() or (scheme, rule) in SAMPLED
            if (scheme, rule) not in SAMPLED or k == 1:
                assert found[rule][-1] == pytest.approx(enumerated(models, k, scheme, rule), abs=1e-6), (scheme, rule)


@pytest.mark.parametrize("seed", [3, 9, 54])
def test_sampled_figures_without_replacement_converge_to_what_the_rules_do(seed: int) -> None:
    """Means of 40,000 sequences of values in 0..1: five standard errors are at most 0.0125."""
    models = ToyLM(5, seed, concentration=0.7), ToyLM(5, seed + 1, concentration=0.7)
    for k in (2, 3):
        found = reached(models, k, Law.WITHOUT_REPLACEMENT, 40_000)
        for rule in RULES[Law.WITHOUT_REPLACEMENT]:
            exact = enumerated(models, k, Law.WITHOUT_REPLACEMENT, rule)
            assert found[rule][-1] == pytest.approx(exact, abs=0.0125), rule
            assert found[rule][-1] <= found[OPTIMUM][-1] + 0.0125


def test_a_row_shorter_than_the_drafts_has_figures_all_the_same() -> None:
    models = ToyLM(5, 1), ToyLM(5, 2, allowed=(1, 3))
    inside = float(models[0].probs(CONTEXT)[[1, 3]].sum())
    for scheme in (Law.WITHOUT_REPLACEMENT, Law.TOP_PLUS_ONE, Law.FIXED):
        found = reached(models, 8, scheme, 20_000)
        assert found[OPTIMUM][-1] == pytest.approx(inside)
        assert found["invariant"][-1] == pytest.approx(inside, abs=0.01 if (scheme, "invariant") in SAMPLED else 1e-9)
        assert all(np.isfinite(values).all() for values in found.values())


@given(models=pairs)
@settings(max_examples=15, deadline=None)
def test_tokens_on_a_tree_are_those_of_the_rule_enumerated_in_full(models: tuple[ToyLM, ToyLM]) -> None:
    target, draft = models
    for scheme, rules in (
        (Law.IID, ("invariant", "naive", "recursive", "k-seq", "traversal")),
        (Law.WITHOUT_REPLACEMENT, ("recursive", "traversal")),
        (Law.TOP_PLUS_ONE, ("optimal", "traversal")),
    ):
        trees = list(every_tree(scheme, (2, 1), draft))
        for tree, _ in trees[:: max(1, len(trees) // 4)]:
            rows = TableRows(target, CONTEXT, tree)
            for rule in rules:
                full = said(verifier(rule), tree, target)
                assert tree_tokens(verifier(rule), tree, rows) == pytest.approx(full, abs=1e-6), rule


@given(models=pairs)
@settings(max_examples=15, deadline=None)
def test_tokens_on_a_chain_average_to_those_of_the_rules_and_block_is_never_behind(
    models: tuple[ToyLM, ToyLM],
) -> None:
    target, draft = models
    totals = dict.fromkeys(("invariant", "rejection", "block"), 0.0)
    exact = dict(totals)
    for tree, weight in every_tree(Law.IID, (1, 1, 1), draft):
        tokens = chain_tokens(tree, TableRows(target, CONTEXT, tree))
        assert tokens["block"] >= tokens["rejection"] - 1e-12
        for rule in totals:
            totals[rule] += weight * tokens[rule]
            exact[rule] += weight * said(verifier(rule), tree, target)
    assert totals == pytest.approx(exact, abs=1e-6)


def test_a_tree_finds_its_rows_in_the_union_that_was_run() -> None:
    target, draft = ToyLM(4, 1), ToyLM(4, 2)
    trees = [tree for tree, _ in every_tree(Law.WITHOUT_REPLACEMENT, (2, 1), draft)]
    union = trees[0]
    for tree in trees[1:]:
        union = merge(union, tree)
    rows = TableRows(target, CONTEXT, union)
    for tree in trees:
        part, alone = part_of(union, rows, tree), TableRows(target, CONTEXT, tree)
        assert all(torch.equal(part.probs(node), alone.probs(node)) for node in range(len(tree)))


def test_errors_are_taken_over_texts() -> None:
    values, texts = np.array([0.0, 0.0, 1.0, 1.0]), np.array([0, 0, 1, 1])
    assert mean(values, texts) == {"mean": 0.5, "error": pytest.approx(0.5)}  # two texts that agree with themselves
    assert mean(values, np.zeros(4))["error"] == pytest.approx(np.std(values, ddof=1) / 2)
    assert mean(values[:1], texts[:1])["error"] is None


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    rows = [{"prompt": "the cat sat on the mat"}, {"turns": ["Hello there", "And then?"]}, {"prompt": "Who are you?"}]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def run(model: Path, prompts: Path, *more: str) -> Result:
    return CliRunner().invoke(
        app, ["bound", "--model", str(model), "--prompts", str(prompts), "-n", "6", "--positions", "6", *more]
    )


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.3}])
def test_the_text_is_plain_decodings_and_nothing_of_it_depends_on_the_drafts(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, sampling: dict[str, Any]
) -> None:
    params = SamplingParams(**{"temperature": 1.0, "seed": 5, "max_new_tokens": 8, "ignore_eos": True} | sampling)
    texts = [Prompt("a", ("the cat",)), Prompt("b", ("who",))]
    with outrider.load(str(model_folder), method="plain", max_slots=1, strict=True) as engine:
        plain = [engine.chat(list(text.conversation()), params).token_ids for text in texts]
        written: list[list[int]] = []
        submit = engine.engine.submit

        def listening(*args: Any, **more: Any) -> Any:
            written.append([])
            return submit(*args, **more, on_token=written[-1].append)

        monkeypatch.setattr(engine.engine, "submit", listening)
        made = bound(engine, texts, Plan(params, positions=16, chain=3, tree="2,1"))
    assert [tokens[:8] for tokens in written] == plain
    assert made.complete and [position.text for position in made.positions] == [0] * 8 + [1] * 8


def test_a_drafter_that_is_the_target_leaves_nothing_to_win(model_folder: Path, prompts: Path) -> None:
    outcome = run(model_folder, prompts, "--draft", str(model_folder), "--seed", "1", "--tree", "2,1", "--json")
    assert outcome.exit_code == 0, outcome.output
    out = json.loads(outcome.stdout)
    for scheme in out["schemes"]:
        if scheme["scheme"] != "fixed":
            assert scheme["optimum"][0]["mean"] == pytest.approx(1.0, abs=1e-5)
    chain = {rule["rule"]: rule["tokens_per_step"]["mean"] for rule in out["shapes"][0]["rules"]}
    assert chain["block"] == pytest.approx(6.0, abs=1e-3) and chain["rejection"] == pytest.approx(6.0, abs=1e-3)
    assert chain["invariant"] < 3


def test_json_table_and_page_say_the_same(model_folder: Path, prompts: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    data, page = tmp_path / "out.json", tmp_path / "page.html"
    more = ("--seed", "2", "--tree", "3,1", "--chain", "2", "--trees", "2", "--json", str(data), "--html", str(page))
    outcome = run(model_folder, prompts, *more)
    assert outcome.exit_code == 0, outcome.output
    out = json.loads(data.read_text())
    assert out["complete"] and 1 <= out["positions"] <= 6 and out["drafts"] == list(range(1, DRAFTS + 1))
    assert [scheme["scheme"] for scheme in out["schemes"]] == [str(scheme) for scheme in SCHEMES]
    for scheme in out["schemes"]:
        best = [figure["mean"] for figure in scheme["optimum"]]
        assert len(best) == DRAFTS and all(b >= a - 1e-9 for a, b in pairwise(best))
        assert [rule["rule"] for rule in scheme["rules"]] == list(RULES[Law(scheme["scheme"])])
        for rule in scheme["rules"]:
            for top, reached, gap in zip(scheme["optimum"], rule["acceptance"], rule["gap"], strict=True):
                assert gap["mean"] == pytest.approx(top["mean"] - reached["mean"]) and gap["error"] >= 0
                assert gap["mean"] >= -1e-9 or not rule["exact"]
    first, *trees = out["shapes"]
    assert first["shape"] == "chain of 2" and first["optimum"] == "block" and first["nodes"] == 2
    assert {shape["drawing"] for shape in trees} == set(map(str, SCHEMES))
    for shape in out["shapes"]:
        for rule in shape["rules"]:
            assert 1.0 <= rule["tokens_per_step"]["mean"] <= 3.0
            assert rule["rule"] != shape["baseline"] or rule["gain"]["mean"] == 0.0
    verdict = out["verdict"]
    assert verdict["drafts"] == 3 and verdict["next"] in ("drafter", "rule", "undecided")
    losses = verdict["by_drafts"][2]
    total = losses["best_rule"]["mean"] + losses["rule_gap"]["mean"] + losses["drafter_gap"]["mean"]
    assert total == pytest.approx(1.0)
    assert " ".join(verdict["text"].split()) in " ".join(outcome.stdout.split())
    content = page.read_text()
    assert content.startswith("<!doctype html>") and content.count("<img") == len(SCHEMES) + 1
    assert "http://" not in content.replace("http://www.w3.org", "") and verdict["text"].split(".")[0] in content
    assert str(model_folder) not in data.read_text()


def test_equal_seeds_give_equal_figures(model_folder: Path, prompts: Path) -> None:
    once, again = (run(model_folder, prompts, "--seed", "4", "--tree", "2", "--json") for _ in range(2))
    one, two = json.loads(once.stdout), json.loads(again.stdout)
    assert all(one[key] == two[key] for key in ("schemes", "shapes", "verdict"))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--temperature", "0"), "temperature above 0"),
        (("--positions", "0"), "positions is 0"),
        (("--trees", "0"), "trees is 0"),
        (("--chain", "0"), "chain is 0"),
        (("--tree", "3,x"), "positive numbers"),
        (("--samples", "2"), "one sample"),
        (("--limit", "0"), "limit of 0"),
        (("--option", "nonsense=1"), "no option 'nonsense'"),
        (("--html", "no/such/folder.html"), "does not exist"),
        (("--json", "no/such/folder.json"), "does not exist"),
        (("--prompts", "no-such-file.jsonl"), "no such file"),
    ],
)
def test_a_bad_option_is_refused_before_the_model_is_loaded(prompts: Path, more: tuple[str, ...], message: str) -> None:
    outcome = run(Path("no-such-model"), prompts, *more)
    assert outcome.exit_code == 2 and message in outcome.stderr and outcome.stderr.count("\n") == 1


def test_trees_that_do_not_fit_a_step_are_refused(model_folder: Path, prompts: Path) -> None:
    outcome = run(model_folder, prompts, "--trees", "40")
    assert outcome.exit_code == 2 and "use fewer trees" in outcome.stderr


def test_ctrl_c_keeps_what_was_found(
    model_folder: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[int] = []

    def pressing(*args: Any, **more: Any) -> Any:
        looked.append(1)
        if len(looked) > 3 * len(SCHEMES):  # in the fourth position
            raise KeyboardInterrupt
        return hits(*args, **more)

    monkeypatch.setattr("outrider.bench.bound.bound.hits", pressing)
    data = tmp_path / "out.json"
    outcome = run(model_folder, prompts, "--ignore-eos", "--tree", "2", "--json", str(data))
    assert outcome.exit_code == 130, outcome.output
    out = json.loads(data.read_text())
    assert out["complete"] is False and out["positions"] == 3 and "interrupted" in outcome.stdout


def test_nothing_found_is_said_and_not_divided_by(model_folder: Path) -> None:
    def press(*_: Any) -> None:
        raise KeyboardInterrupt

    with outrider.load(str(model_folder), method="plain", max_slots=1, strict=True) as engine:
        made = bound(engine, [Prompt("a", ("the cat",))], Plan(), on_progress=press)
        with pytest.raises(InputError, match="no prompts"):
            bound(engine, [], Plan())
    out = result(made)
    assert out["positions"] == 0 and out["schemes"] == [] and out["verdict"] is None
    assert "no position" in " ".join(bound_report.notes(out)) and bound_report.terminal(out) is not None
