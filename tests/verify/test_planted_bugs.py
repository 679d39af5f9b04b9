"""The exhaustive kit can fail: each classic mistake, put into a copy of a rule's source, changes what is said."""

import importlib
import inspect
import sys
from types import ModuleType

import pytest

from outrider.check.drawings import DRAWINGS
from outrider.check.exhaustive import CASES, examine
from outrider.core.protocols import Verifier

WAYS = {drawing.name: drawing for drawing in DRAWINGS}
NOT_NORMALISED = "iid, some propose nothing"


def mutant(monkeypatch: pytest.MonkeyPatch, module: str, rule: str, right: str, wrong: str) -> Verifier:
    """The rule with one piece of its source replaced."""
    source = inspect.getsource(importlib.import_module(f"outrider.verify.{module}"))
    assert right in source, "the line that the bug goes into has changed"
    copy = ModuleType(f"mutant_{module}")
    monkeypatch.setitem(sys.modules, copy.__name__, copy)  # dataclasses look their module up
    exec(compile(source.replace(right, wrong), copy.__name__, "exec"), copy.__dict__)
    made: Verifier = copy.__dict__[rule]()
    return made


BUGS = {
    "k-seq with a factor below the root": (
        "kseq", "KSeq", "    return high\n", "    return 0.9 * high\n", "iid", (3,)),
    "k-seq forgets that k draws were tested": (
        "kseq", "KSeq", "kept * _tests(float(kept.sum()), len(draws))", "kept", "iid", (2,)),
    "k-seq drops repeated draws": (
        "kseq", "KSeq", "for j, draw in enumerate(draws):",
        "for j, draw in enumerate({d.token: d for d in draws}.values()):", "iid", (3,)),
    "k-seq takes the survivors for all": (
        "kseq", "KSeq", "rho = factor(over, row.probs, len(draws))", "rho = factor(over, row.probs, 1)", "iid", (2, 1)),
    "naive corrects from p": (
        "naive", "Naive", "left, _ = after_rejection(p, 1.0, draw.row)", "left = p", "without replacement", (2,)),
    "naive tests a second draw against p": (
        "naive", "Naive", "        break\n", "", "iid", (2,)),
    "optimal corrects from p": (
        "optimal", "Optimal", "left, _ = after_rejection(p, 1.0, draw.row)", "left = p", "top plus one", (2, 1)),
    "optimal ignores no proposal": (
        "optimal", "Optimal", "(draw := draws[-1]).row is not None:",
        "(draw := draws[-1]).row is not None and draw.token != NOTHING:", NOT_NORMALISED, (1,)),
    "block takes the residual of a token": (
        "block", "Block", "after_rejection(p, 1.0 / w, row)", "after_rejection(p, 1.0, row)", "iid", (1, 1)),
    "block keeps a prefix with its weight": (
        "block", "Block", "keep = rest / (rest + (1.0 - w)) if rest > 0.0 else float(w == 1.0)", "keep = w",
        "iid", (1, 1)),
    "block says the bonus token of p after a rejection": (
        "block", "Block", "noise.draw(left, node, len(draws) + 1)", "noise.draw(p, node, len(draws) + 1)", "iid", (1,)),
    "traversal keeps the weight after a sibling failed": (
        "traversal", "Traversal", "a, left, mass = said / (said + (1.0 - a)), rest, total",
        "a, left, mass = a, rest, total", "iid", (1, 2)),
    "traversal keeps the distribution after a sibling failed": (
        "traversal", "Traversal", "a, left, mass = said / (said + (1.0 - a)), rest, total",
        "a = said / (said + (1.0 - a))", "iid", (2, 1)),
    "traversal forgets the weight in the residual": (
        "traversal", "Traversal", "rest, total = after_rejection(left, mass / a, draw.row)",
        "rest, total = after_rejection(left, mass, draw.row)", "iid", (1, 1)),
    "traversal drops what stands in no node": (
        "traversal", "Traversal", "if self.noise.coin(weight, node, j) else None", "if False else None",
        "iid, token 0 in no node", (2,)),
    "traversal tests the row of the first draw again": (
        "traversal", "Traversal", "after_rejection(left, mass / a, draw.row)",
        "after_rejection(left, mass / a, draws[0].row)", "without replacement", (2, 1)),
    "transport says p where nothing was kept": (
        "transport", "Transport", "noise.draw(plan.left, node, 1)", "noise.draw(p, node, 1)", "iid", (2,)),
    "transport takes draws without replacement for independent ones": (
        "transport", "Transport", "if scheme is Law.WITHOUT_REPLACEMENT:", "if False:", "without replacement", (2,)),
}  # fmt: skip


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_moves_the_output_distribution(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, rule, right, wrong, way, shape = BUGS[bug]
    sound: Verifier = getattr(importlib.import_module(f"outrider.verify.{module}"), rule)()
    assert examine(sound, WAYS[way], shape, CASES[0]).passed
    found = [
        examine(mutant(monkeypatch, module, rule, right, wrong), WAYS[way], shape, case).difference
        for case in (CASES[0], CASES[5])
    ]
    assert max(found) > 1e-3


RULES = {"rejection": "Rejection", "recursive": "Recursive", "naive": "Naive", "kseq": "KSeq", "optimal": "Optimal",
         "block": "Block", "traversal": "Traversal"}  # fmt: skip


@pytest.mark.parametrize("module", RULES)
def test_every_rule_uses_the_shared_residual_so_that_its_bug_can_be_planted(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule: Verifier = getattr(importlib.import_module(f"outrider.verify.{module}"), RULES[module])()
    monkeypatch.setattr(f"outrider.verify.{module}.after_rejection", lambda left, mass, row: (left, mass))
    assert examine(rule, WAYS["iid"], (1, 1), CASES[0]).difference > 1e-3


def test_block_that_stops_at_the_first_failure_is_caught() -> None:
    """Prefixes tried from the shortest up, kept while they succeed."""
    from outrider.check.toy import TableRows
    from outrider.core.protocols import Noise, Rows
    from outrider.core.records import Verdict
    from outrider.core.tree import TokenTree
    from outrider.verify.block import Block
    from outrider.verify.residual import accept_ratio, after_rejection

    class FirstFailure(Block):
        def verify(self, tree: TokenTree, rows: Rows, noise: Noise) -> Verdict:
            assert isinstance(rows, TableRows)
            node, w, last, left = 0, 1.0, 0, rows.probs(0)
            while draws := tree.draws[node]:
                rest, total = after_rejection(rows.probs(node), 1.0 / w, draws[0].row)
                if node == 0 or noise.coin(w * total / (w * total + (1.0 - w)), node, 1):
                    last, left = node, rest
                else:
                    break
                w = accept_ratio(rows.probs(node), 1.0 / w, draws[0])
                node = draws[0].child
            else:
                if noise.coin(w, node, 0):
                    last, left = node, rows.probs(node)
            return Verdict(tuple(tree.path(last)), noise.draw(left, last, 2))

    assert examine(FirstFailure(), WAYS["iid"], (1, 1), CASES[0]).difference > 1e-3
