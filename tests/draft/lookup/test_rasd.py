"""RASD: the union of the model's tree and pruned retrieved branches, exact when sampled; the draft's cache follows."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.check.exhaustive import CASES, CONTEXT, TOLERANCE, Case, _Text, distance, step_distribution
from outrider.check.toy import ToyLM, ToySource
from outrider.control.fixed import Fixed
from outrider.core.engine import Engine
from outrider.core.proposals import Proposals
from outrider.core.protocols import Grower, Recipe
from outrider.core.records import Budget, Needs
from outrider.core.sampling import SamplingParams
from outrider.core.tree import Draw, Law, QRow, TokenTree, from_paths, merge
from outrider.draft.grown import Grown
from outrider.draft.lookup import rasd
from outrider.draft.lookup.rasd import FirstDistributions, Rasd
from outrider.grow.kary import KAry
from outrider.grow.rsd import StochasticBeam
from outrider.grow.topk import TopK
from outrider.runtime.targets import eager_target
from outrider.verify.invariant import Invariant
from outrider.verify.recursive import Recursive
from tests.watched import Watched, llama

PLAIN = Recipe("plain", None, Invariant(), Fixed(Budget(0, 0)))


@dataclass
class Found:
    """A retriever that always finds the same paths, best first; `budgets` is what it was asked for."""

    paths: list[list[int]]
    name: str = "found"
    needs: Needs = field(default_factory=Needs)
    shared_noise: bool = False
    contexts: dict = field(default_factory=dict)
    budgets: list[Budget] = field(default_factory=list)

    def begin(self, slot, context) -> None:
        self.contexts[slot] = context

    def absorb(self, chunks) -> None: ...

    def end(self, slot) -> None:
        self.contexts.pop(slot)

    def observe(self, slots, records) -> None: ...

    def propose(self, slots, budgets, noise) -> Proposals:
        self.budgets += budgets
        made = []
        for slot, budget in zip(slots, budgets, strict=True):
            pending = int(self.contexts[slot].tokens[-1])
            tree = from_paths(pending, [path[: budget.depth] for path in self.paths], self.name)
            made.append(tree.keep(range(1, min(len(tree), budget.nodes + 1))))
        return Proposals(made)


def joined(draft: ToyLM, grower: Grower, paths, sampled: bool = True, **options) -> Rasd:
    first = FirstDistributions(ToySource(draft))
    drafter = Rasd(Grown(first, grower, sampled), first, Found(paths), **options)
    drafter.begin(0, _Text(np.array(CONTEXT)))
    return drafter


def law_of(case: Case, grower, paths, budget: Budget, verifier=None, **options):
    def draft(branches) -> TokenTree:
        return joined(case.draft, grower(), paths, **options).propose([0], [budget], [branches.noise("draft")])[0]

    return step_distribution(verifier or Recursive(), draft, case.target)


RETRIEVED = [[[0, 1], [0, 2]], [[2], [1, 1], [0, 0]]]
SETTINGS = {
    "beam": (lambda: StochasticBeam(2, 2), Budget(6, 2), {"keep": 3}),
    "iid": (lambda: KAry((2, 1), "iid"), Budget(6, 2), {"keep": 2}),
    "half pruned": (lambda: KAry((2,), "without-replacement"), Budget(4, 2), {"keep": 1}),
    "top-k": (lambda: TopK(2, 2), Budget(5, 3), {"keep": 3}),
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("paths", RETRIEVED)
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_sampled_tree_with_retrieved_branches_gives_the_targets_distribution(setting: str, paths, case: Case) -> None:
    grower, budget, options = SETTINGS[setting]
    emitted, _ = law_of(case, grower, paths, budget, **options)
    assert sum(emitted.values()) == pytest.approx(1.0)
    assert distance(emitted, case.target, 4) <= TOLERANCE


def test_sampled_draws_come_first_and_the_distribution_is_mixed() -> None:
    seen = set()

    def draft(branches) -> TokenTree:
        drafter = joined(CASES[0].draft, KAry((1, 1), "iid"), [[0, 1], [1], [2]], keep=3)
        tree = drafter.propose([0], [Budget(6, 2)], [branches.noise("draft")])[0]
        seen.add(tree.law(0))
        rows = [d.row is None for d in tree.draws[0]]
        assert rows == sorted(rows) and rows.count(True) >= 2
        return tree

    step_distribution(Recursive(), draft, CASES[0].target)
    assert seen == {Law.MIXED}


def test_retrieved_tokens_in_the_middle_with_an_invented_distribution_are_seen(monkeypatch) -> None:
    """The published shortcut: a retrieved child counts as drawn from a flat distribution, between the sampled ones."""

    def wrong(first: TokenTree, second: TokenTree) -> TokenTree:
        tree = merge(first, second)
        flat = QRow(np.arange(3), np.full(3, 1 / 3))
        draws = tuple(
            tuple(sorted((Draw(d.token, d.child, d.row or flat) for d in draws), key=lambda d: d.row is not flat))
            for draws in tree.draws
        )
        return TokenTree(tree.tokens, tree.parents, draws, tree.origins)

    monkeypatch.setattr(rasd, "merge", wrong)
    grower, budget, options = SETTINGS["iid"]
    emitted, _ = law_of(CASES[0], grower, RETRIEVED[1], budget, **options)
    assert distance(emitted, CASES[0].target, 4) > 1e-3


tries = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=3), max_size=5)


def prefixes(tree: TokenTree) -> set[tuple[int, ...]]:
    return {tuple(tree.path_tokens(i)) for i in range(1, len(tree))}


@given(paths=tries, keep=st.integers(0, 3), share=st.sampled_from([0.0, 0.3, 0.5, 1.0]), nodes=st.integers(1, 9))
def test_the_tree_is_the_union_of_the_models_and_the_pruned_one(paths, keep, share, nodes) -> None:
    draft, budget = CASES[0].draft, Budget(nodes, 3)
    drafter = joined(draft, TopK(3, 3, 3), paths, sampled=False, keep=keep, share=share)
    tree = drafter.propose([0], [budget], [None])[0]
    assert tree.candidates <= nodes
    found = Found(paths, contexts=drafter.retriever.contexts).propose([0], [budget], [None])[0]
    reserved = min(int(nodes * share), found.candidates)
    alone = joined(draft, TopK(3, 3, 3), []).propose([0], [Budget(nodes - reserved, 3)], [None])[0]
    model = ToySource(draft)
    model.begin(0, _Text(np.array(CONTEXT)))
    row = model.start([0])[0] if nodes > reserved else None
    likely = set(row.ids[np.argsort(-row.probs, kind="stable")[:keep]].tolist()) if row is not None else {0, 1, 2}
    fits = [tuple(found.path_tokens(i)) for i in range(1, len(found)) if found.path_tokens(i)[0] in likely]
    assert prefixes(tree) == prefixes(alone) | set(fits[:reserved])
    if keep == 0 and row is not None:
        assert prefixes(tree) == prefixes(alone)


class Knows(Found):
    """Finds what the target will say, which the draft model does not know."""

    def propose(self, slots, budgets, noise) -> Proposals:
        made = []
        for slot, budget in zip(slots, budgets, strict=True):
            context = self.contexts[slot].tokens.tolist()
            text = next(t for t in self.paths if t[: len(context)] == context)
            made.append(from_paths(context[-1], [text[len(context) :][: min(budget.depth, budget.nodes)]], self.name))
        return Proposals(made)


@pytest.mark.parametrize("budget", [Budget(8, 4), Budget(1, 1), Budget(3, 4)])
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_the_drafts_cache_follows_when_a_retrieved_candidate_is_accepted(budget: Budget, share: float) -> None:
    engine = Engine(eager_target(llama(1), max_slots=4), PLAIN, strict=True)
    prompts, params = [[1, 2, 3, 4], [9, 8], [5]], SamplingParams(max_new_tokens=25)
    texts = [engine.submit(p, params, PLAIN).result().token_ids for p in prompts]
    first = FirstDistributions(Watched(eager_target(llama(2), max_slots=8)))
    known = Knows([p + t + [0] * 9 for p, t in zip(prompts, texts, strict=True)])
    drafter = Rasd(Grown(first, StochasticBeam(2, 3)), first, known, keep=53, share=share)
    Watched.steps = 0
    handles = [engine.submit(p, params, Recipe("rasd", drafter, Recursive(), Fixed(budget))) for p in prompts]
    results = [handle.result() for handle in handles]
    assert [r.token_ids for r in results] == texts
    assert Watched.steps == sum(r.stats.steps for r in results) > 10
    origins = {o.drafter for r in results for o in r.origins if o.depth}
    if budget.nodes * share >= 1:
        assert "found" in origins and np.mean([r.stats.mean_accepted for r in results]) > 1.9
