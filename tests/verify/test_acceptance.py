"""How often the rules accept: closed forms, the linear program's optimum, and the orderings that are theorems."""

from collections.abc import Sequence
from functools import partial
from itertools import chain, combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.check.drawings import DRAWINGS, Drawing, draw_tree
from outrider.check.enumeration import Branches, branches
from outrider.check.exhaustive import CONTEXT, Case, output_distribution
from outrider.check.toy import TableRows, ToyLM, as_row
from outrider.core.errors import InputError
from outrider.core.protocols import Verifier
from outrider.core.tree import Law, QRow, TokenTree
from outrider.verify import kseq, recursive
from outrider.verify.block import Block
from outrider.verify.kseq import KSeq
from outrider.verify.naive import Naive
from outrider.verify.optimal import Optimal, optimal_acceptance, optimal_acceptances
from outrider.verify.recursive import Recursive
from outrider.verify.rejection import Rejection
from outrider.verify.transport import Transport, draft_probs, transport_acceptance
from outrider.verify.traversal import Traversal

WAYS = {drawing.name: drawing for drawing in DRAWINGS}
SCHEMES = {
    Law.IID: WAYS["iid"],
    Law.WITHOUT_REPLACEMENT: WAYS["without replacement"],
    Law.TOP_PLUS_ONE: WAYS["top plus one"],
}
toys = st.builds(
    lambda vocab, seed, zeros, concentration: Case(
        "random",
        *(ToyLM(vocab, seed + i, zeros=zeros if i else zeros / 2, concentration=concentration) for i in range(3)),
    ),
    vocab=st.integers(2, 5),
    seed=st.integers(0, 2**32),
    zeros=st.sampled_from([0.0, 0.4]),
    concentration=st.sampled_from([0.2, 1.0, 5.0]),
)


def rows_of(case: Case) -> tuple[np.ndarray, QRow]:
    return case.target.probs(CONTEXT), case.draft.row(CONTEXT)


def hits(verifier: Verifier, drawing: Drawing, draws: int, case: Case) -> float:
    """Probability that the first token said is one of the drafted ones."""

    def draft(paths: Branches) -> TokenTree:
        return draw_tree(drawing, (draws,), case.draft, case.second, CONTEXT, paths.noise("draft"))

    def first(paths: Branches, tree: TokenTree) -> bool:
        return bool(verifier.verify(tree, TableRows(case.target, CONTEXT, tree), paths.noise("verify")).path)

    return sum(
        weight * probability
        for tree, weight in branches(draft)
        for hit, probability in branches(partial(first, tree=tree))
        if hit
    )


def tokens_said(verifier: Verifier, drawing: Drawing, shape: tuple[int, ...], case: Case) -> float:
    said, _ = output_distribution(verifier, drawing, shape, case, limit=200_000)
    return sum(len(tokens) * weight for tokens, weight in said.items())


@given(case=toys, k=st.integers(1, 4), scheme=st.sampled_from(list(SCHEMES)))
@settings(max_examples=100, deadline=None)
def test_the_bound_is_the_optimum_of_the_linear_program(case: Case, k: int, scheme: Law) -> None:
    p, q = rows_of(case)
    bound = optimal_acceptance(p, q, k, scheme)
    assert bound == pytest.approx(transport_acceptance(p, q, k, scheme), abs=1e-8)
    assert bound == optimal_acceptance(torch.from_numpy(p), q, k, scheme)


@given(case=toys, k=st.integers(1, 3), scheme=st.sampled_from([Law.IID, Law.WITHOUT_REPLACEMENT]))
@settings(max_examples=40, deadline=None)
def test_the_bound_is_the_least_cut_over_all_subsets(case: Case, k: int, scheme: Law) -> None:
    p, q = rows_of(case)
    drafts = draft_probs(q, k, scheme)
    subsets = chain.from_iterable(combinations(range(len(p)), size) for size in range(len(p) + 1))
    cuts = [sum(p[t] for t in h) - sum(w for tokens, w in drafts.items() if tokens <= set(h)) for h in subsets]
    assert optimal_acceptance(p, q, k, scheme) == pytest.approx(1 + min(cuts), abs=1e-12)


@given(case=toys, k=st.integers(1, 3))
@settings(max_examples=30, deadline=None)
def test_a_row_that_may_propose_nothing_has_its_bound_too(case: Case, k: int) -> None:
    p, q = rows_of(case)
    q = QRow(q.ids, q.probs * 0.7)
    assert optimal_acceptance(p, q, k, Law.IID) == pytest.approx(transport_acceptance(p, q, k, Law.IID), abs=1e-8)
    with pytest.raises(InputError, match="without replacement"):
        optimal_acceptance(p, q, k, Law.WITHOUT_REPLACEMENT)


@pytest.mark.parametrize("spread", [1.0, 4.0, 12.0])
def test_the_bound_without_replacement_is_right_on_long_and_steep_rows(spread: float) -> None:
    """Two drafts have a closed form; steep rows have arrival rates from 1 down to 1e-30."""
    rng = np.random.default_rng(5)
    p, q = (np.exp(spread * rng.normal(size=1500)) for _ in range(2))
    p, q = p / p.sum(), q / q.sum()
    order = np.argsort(p / q)
    inside = [0.0]
    for m in range(1, len(q) + 1):
        h = q[order[:m]]
        inside.append(float((h * (h.sum() - h) / (1 - h)).sum()))  # one draft, then another of H without it
    said = np.concatenate([[0.0], np.cumsum(p[order])])
    assert optimal_acceptance(p, as_row(q), 2, Law.WITHOUT_REPLACEMENT) == pytest.approx(
        1 + float((said - np.array(inside)).min()), abs=1e-10
    )


@given(case=toys)
@settings(max_examples=40, deadline=None)
def test_the_bound_grows_with_the_drafts_from_the_overlap_to_the_support(case: Case) -> None:
    p, q = rows_of(case)
    dense = np.zeros_like(p)
    dense[q.ids] = q.probs
    for scheme in SCHEMES:
        curve = optimal_acceptances(p, q, 6, scheme)
        assert curve[0] == pytest.approx(np.minimum(p, dense).sum())
        assert (np.diff(curve) > -1e-9).all()
        assert curve.max() <= p[q.ids].sum() + 1e-9
    assert optimal_acceptance(p, q, len(p), Law.WITHOUT_REPLACEMENT) == pytest.approx(p[q.ids].sum())
    independent = optimal_acceptances(p, q, 4, Law.IID)
    assert (optimal_acceptances(p, q, 4, Law.WITHOUT_REPLACEMENT) >= independent - 1e-9).all()


def test_an_unknown_scheme_is_an_input_error() -> None:
    row = as_row(np.array([0.5, 0.5]))
    with pytest.raises(InputError, match="mixed"):
        optimal_acceptance(np.array([0.5, 0.5]), row, 2, Law.MIXED)
    with pytest.raises(InputError, match="0 drafts"):
        optimal_acceptance(np.array([0.5, 0.5]), row, 0, Law.IID)


@given(case=toys, k=st.integers(1, 3), scheme=st.sampled_from(list(SCHEMES)))
@settings(max_examples=60, deadline=None)
def test_no_rule_accepts_more_than_the_bound(case: Case, k: int, scheme: Law) -> None:
    bound = optimal_acceptance(*rows_of(case), k, scheme)
    rules: Sequence[Verifier] = [Recursive(), Naive(), Traversal(), KSeq(), Optimal(), Transport()]
    for rule in rules:
        if scheme in rule.honours and not (rule.name == "optimal" and scheme is Law.IID):
            assert hits(rule, SCHEMES[scheme], k, case) <= bound + 1e-9


@given(case=toys, k=st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_the_optimal_rule_reaches_the_optimum_of_its_drafts(case: Case, k: int) -> None:
    reached = hits(Optimal(), SCHEMES[Law.TOP_PLUS_ONE], k, case)
    assert reached == pytest.approx(transport_acceptance(*rows_of(case), k, Law.TOP_PLUS_ONE), abs=1e-6)
    assert reached == pytest.approx(optimal_acceptance(*rows_of(case), k, Law.TOP_PLUS_ONE), abs=1e-12)


@given(case=toys, k=st.integers(1, 3), scheme=st.sampled_from(list(SCHEMES)))
@settings(max_examples=40, deadline=None)
def test_the_transport_rule_reaches_the_optimum(case: Case, k: int, scheme: Law) -> None:
    assert hits(Transport(), SCHEMES[scheme], k, case) == pytest.approx(
        transport_acceptance(*rows_of(case), k, scheme), abs=1e-8
    )


@given(case=toys, k=st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_k_seq_is_within_its_factor_of_the_optimum(case: Case, k: int) -> None:
    p, q = rows_of(case)
    accepts, best = kseq.acceptance(torch.from_numpy(p), q, k), transport_acceptance(p, q, k, Law.IID)
    assert (1 - 1 / np.e) * best - 1e-9 <= accepts <= best + 1e-9
    if k < 4:
        assert accepts - 1e-9 <= hits(KSeq(), WAYS["iid"], k, case)  # the correction may hit a draft besides
    if k > 1:
        assert accepts >= kseq.acceptance(torch.from_numpy(p), q, k - 1) - 1e-9


@given(case=toys, k=st.integers(2, 8))
@settings(max_examples=100, deadline=None)
def test_the_factor_of_k_seq_is_the_least_that_leaves_no_negative_residual(case: Case, k: int) -> None:
    probs, row = rows_of(case)
    p, q = probs[row.ids], row.probs

    def least(rho: float) -> float:
        kept = np.minimum(q, p / rho)
        beta = kept.sum()
        return float((p - kept * ((1 - (1 - beta) ** k) / beta if beta > 0 else 0.0)).min())

    rho = kseq.factor(p, q, k)
    assert 1 <= rho <= k and least(rho) >= -1e-12
    if rho > 1.001 and (p / q <= 1).any() and p[p / q <= 1].max() > 1e-3:  # a token capped by p shows it
        assert least(rho * 0.999) < 0


@given(case=toys, k=st.integers(1, 3))
@settings(max_examples=20, deadline=None)
def test_recursive_accepts_as_its_formula_says(case: Case, k: int) -> None:
    p, q = rows_of(case)
    assert recursive.acceptance(torch.from_numpy(p), [q] * k) == pytest.approx(hits(Recursive(), WAYS["iid"], k, case))


def test_naive_accepts_as_its_formula_says() -> None:
    case = Case("five tokens", ToyLM(5, 1), ToyLM(5, 2), ToyLM(5, 3))
    p, q = case.target.probs(CONTEXT), case.draft.probs(CONTEXT)
    for k in (1, 2, 3):
        rescued = (np.maximum(p - q, 0) * (1 - (1 - q) ** (k - 1))).sum()
        assert hits(Naive(), WAYS["iid"], k, case) == pytest.approx(np.minimum(p, q).sum() + rescued)


@given(case=toys, scheme=st.sampled_from([Law.IID, Law.WITHOUT_REPLACEMENT]))
@settings(max_examples=25, deadline=None)
def test_traversal_of_one_level_is_recursive_rejection(case: Case, scheme: Law) -> None:
    assert hits(Traversal(), SCHEMES[scheme], 3, case) == pytest.approx(hits(Recursive(), SCHEMES[scheme], 3, case))


@given(case=toys, length=st.integers(1, 3), way=st.sampled_from(["iid", "iid, some propose nothing"]))
@settings(max_examples=60, deadline=None)
def test_block_verification_says_no_fewer_tokens_than_token_by_token(case: Case, length: int, way: str) -> None:
    shape = (1,) * length
    block, token = (tokens_said(rule, WAYS[way], shape, case) for rule in (Block(), Rejection()))
    assert block >= token - 1e-9
    if length == 1:
        assert block == pytest.approx(token)


class ContextFree:
    greedy = False

    def __init__(self, *probs: float) -> None:
        self.table = np.array(probs)

    def probs(self, context: Sequence[int]) -> np.ndarray:
        return self.table

    def row(self, context: Sequence[int]) -> QRow:
        return as_row(self.table)


@pytest.mark.parametrize(("rule", "drafts_kept"), [(Rejection(), 10 / 9), (Block(), 11 / 9), (Traversal(), 11 / 9)])
def test_the_papers_binary_example(rule: Verifier, drafts_kept: float) -> None:
    p, q = ContextFree(1 / 3, 2 / 3), ContextFree(2 / 3, 1 / 3)
    case = Case("binary", p, q, q)  # type: ignore[arg-type]
    assert tokens_said(rule, WAYS["iid"], (1, 1), case) == pytest.approx(1 + drafts_kept)


def test_traversal_says_more_than_recursive_rejection_on_average_over_trees() -> None:
    for way, shape in (("iid", (2, 1)), ("without replacement", (2, 2))):
        gains = []
        for seed in range(6):
            case = Case("random", *(ToyLM(3, 10 * seed + i) for i in range(3)))
            gains.append(
                tokens_said(Traversal(), WAYS[way], shape, case) - tokens_said(Recursive(), WAYS[way], shape, case)
            )
        assert np.mean(gains) > 0.001


def test_drafts_without_replacement_are_accepted_more_often_on_average() -> None:
    gains = []
    for seed in range(30):
        case = Case("random", *(ToyLM(5, 10 * seed + i) for i in range(3)))
        gains.append(hits(Recursive(), WAYS["without replacement"], 2, case) - hits(Recursive(), WAYS["iid"], 2, case))
    assert np.mean(gains) > 0.01
