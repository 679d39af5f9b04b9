"""What the rules promise besides exactness: acceptance rates, refusals, the traps of zero probability, lazy rows."""

import sys
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from outrider.check.drawings import DRAWINGS, Drawing, draw_tree
from outrider.check.enumeration import Branches, outcomes
from outrider.check.exhaustive import CASES, CONTEXT, Case, distance, output_distribution
from outrider.check.toy import TableRows, ToyLM, as_row
from outrider.core.errors import InputError, MissingExtra, UnsupportedDraws
from outrider.core.noise import DRAFT, VERIFY, StreamNoise, text_hash
from outrider.core.protocols import Noise, Verifier
from outrider.core.tree import NOTHING, Draw, Law, QRow, TokenTree, chain, fixed, from_paths, root
from outrider.verify.block import Block
from outrider.verify.invariant import Invariant
from outrider.verify.kseq import KSeq
from outrider.verify.naive import Naive
from outrider.verify.optimal import Optimal
from outrider.verify.recursive import Recursive
from outrider.verify.rejection import Rejection
from outrider.verify.residual import after_rejection
from outrider.verify.transport import Transport
from outrider.verify.traversal import Traversal

ONE_DRAW: list[Verifier] = [Rejection(), Optimal(), Block()]  # of sampled draws, one a node
SEVERAL: list[Verifier] = [Recursive(), Naive(), KSeq(), Traversal(), Transport()]
COUPLED: list[Verifier] = [*ONE_DRAW, *SEVERAL]
VERIFIERS: list[Verifier] = [Invariant(), *COUPLED]
SHAPE = {verifier.name: (1, 1, 1) if verifier in ONE_DRAW else (2, 2) for verifier in VERIFIERS}
WAYS = {drawing.name: drawing for drawing in DRAWINGS}
each = pytest.mark.parametrize("verifier", VERIFIERS, ids=lambda v: v.name)
coupled = pytest.mark.parametrize("verifier", COUPLED, ids=lambda v: v.name)

GENERIC = Case("five tokens", ToyLM(5, 1), ToyLM(5, 2), ToyLM(5, 3))
P, Q = GENERIC.target.probs(CONTEXT), GENERIC.draft.probs(CONTEXT)


class SameRow:
    """The same distribution at every node."""

    greedy = False

    def __init__(self, probs: list[float] | np.ndarray, dtype: torch.dtype = torch.float64) -> None:
        self.row = torch.tensor(probs, dtype=dtype)

    def probs(self, node: int) -> torch.Tensor:
        return self.row

    def argmax(self, node: int) -> int:
        return int(self.row.argmax())

    def pick(self, node: int, path: Sequence[int], noise: Noise) -> int:
        return noise.pick(self.row, path)

    def together(self) -> None:
        return None


class Heads:
    """The worst coin for `u <= p`: u is exactly 0, so p = 0 comes up heads."""

    def coin(self, p: float, node: int, draw: int) -> bool:
        return True

    def draw(self, weights: torch.Tensor, node: int, draw: int) -> int:
        return int(np.nonzero(np.asarray(weights))[0][0])

    def pick(self, probs: torch.Tensor, depth: int) -> int:
        return int(torch.nonzero(probs)[0])


class Tails(Heads):
    def coin(self, p: float, node: int, draw: int) -> bool:
        return False


def accepted(verifier: Verifier, drawing: Drawing, draws: int, case: Case = GENERIC) -> float:
    """Probability that one level of `draws` draws takes the walk at least one node down."""
    said, _ = output_distribution(verifier, drawing, (draws,), case)
    return sum(p for tokens, p in said.items() if len(tokens) > 1)


def tree_of(*draws: Draw, tokens: tuple[int, ...] = ()) -> TokenTree:
    """Node 0 with these draws and leaf children carrying `tokens`."""
    count = len(tokens)
    parents = np.array([-1] + [0] * count)
    return TokenTree(np.array([0, *tokens]), parents, (tuple(draws), *[()] * count))


def verdict_probs(verifier: Verifier, tree: TokenTree, rows: SameRow) -> dict[tuple[tuple[int, ...], int], float]:
    def run(paths: Branches) -> tuple[tuple[int, ...], int]:
        verdict = verifier.verify(tree, rows, paths.noise())
        return verdict.path, verdict.next_token

    return outcomes(run)


@pytest.mark.parametrize("draws", [1, 2, 3])
def test_invariant_accepts_as_often_as_the_target_says_a_drawn_token(draws: int) -> None:
    assert accepted(Invariant(), WAYS["iid"], draws) == pytest.approx((P * (1 - (1 - Q) ** draws)).sum())


@pytest.mark.parametrize("draws", [1, 2, 3])
def test_recursive_accepts_as_the_multi_round_formula_says(draws: int) -> None:
    p, missed = P, 1.0
    for _ in range(draws):
        missed *= 1 - np.minimum(p, Q).sum()
        p = np.maximum(p - Q, 0)
        p = p / p.sum()
    assert accepted(Recursive(), WAYS["iid"], draws) == pytest.approx(1 - missed)


def test_rejection_accepts_the_overlap_of_p_and_q() -> None:
    assert accepted(Rejection(), WAYS["iid"], 1) == pytest.approx(np.minimum(P, Q).sum())


@pytest.mark.parametrize("verifier", [Invariant(), Optimal(), *SEVERAL], ids=lambda v: v.name)
def test_point_masses_are_accepted_as_often_as_the_target_says_them(verifier: Verifier) -> None:
    best = np.argsort(-Q)[:3]
    assert accepted(verifier, WAYS["fixed"], 3) == pytest.approx(P[best].sum())


def test_top_plus_one_loses_nothing_to_the_order_of_testing() -> None:
    top = int(Q.argmax())
    rest = as_row(Q).without(top)
    overlap = sum(min(P[t], q) for t, q in zip(rest.ids, rest.probs, strict=True))
    assert accepted(Recursive(), WAYS["top plus one"], 2) == pytest.approx(P[top] + overlap)


@coupled
def test_drafting_with_the_targets_own_distribution_is_always_accepted(verifier: Verifier) -> None:
    assert accepted(verifier, WAYS["iid"], 1, Case("", ToyLM(5, 1), ToyLM(5, 1), ToyLM(5, 1))) == pytest.approx(1)


@each
def test_drafting_what_the_target_never_says_is_never_accepted(verifier: Verifier) -> None:
    disjoint = next(case for case in CASES if case.name == "q disjoint from p")
    assert accepted(verifier, WAYS["iid"], 1, disjoint) == 0


def test_rejection_refuses_two_draws_at_a_node_wherever_it_stands() -> None:
    row = QRow(np.array([1, 2]), np.array([0.5, 0.5]))
    deep = TokenTree(
        np.array([0, 1, 2, 1]),
        np.array([-1, 0, 1, 1]),
        ((Draw(1, 1, row),), (Draw(2, 2, row), Draw(1, 3, row)), (), ()),
    )
    with pytest.raises(UnsupportedDraws, match=r"node 1 has 2.*recursive"):
        Rejection().verify(deep, SameRow([1.0, 0.0, 0.0]), Heads())  # the walk alone would end before node 1


def test_recursive_refuses_point_masses_ahead_of_draws_that_may_not_know_them() -> None:
    row = QRow(np.array([1, 2]), np.array([0.5, 0.5]))
    tree = tree_of(Draw(1, 1, None), Draw(2, 2, row), tokens=(1, 2))
    assert tree.law(0) is Law.OTHER
    with pytest.raises(UnsupportedDraws, match=r"node 0.*sampled draws first"):
        Recursive().verify(tree, SameRow([0.2, 0.3, 0.5]), Heads())
    Invariant().verify(tree, SameRow([0.2, 0.3, 0.5]), Heads())


def test_optimal_and_block_refuse_several_sampled_draws_wherever_they_stand() -> None:
    row = QRow(np.array([1, 2]), np.array([0.5, 0.5]))
    deep = TokenTree(
        np.array([0, 1, 2, 1]),
        np.array([-1, 0, 1, 1]),
        ((Draw(1, 1, row),), (Draw(2, 2, row), Draw(1, 3, row)), (), ()),
    )
    with pytest.raises(UnsupportedDraws, match=r"node 1 are iid.*top-plus-one"):
        Optimal().verify(deep, SameRow([1.0, 0.0, 0.0]), Heads())
    with pytest.raises(UnsupportedDraws, match=r"node 1 has 2.*traversal"):
        Block().verify(deep, SameRow([1.0, 0.0, 0.0]), Heads())


def test_optimal_refuses_a_sample_from_a_row_that_still_holds_the_point_masses() -> None:
    row = QRow(np.array([1, 2]), np.array([0.5, 0.5]))
    with pytest.raises(UnsupportedDraws, match="node 0 are other"):
        Optimal().verify(tree_of(Draw(1, 1, None), Draw(2, 2, row), tokens=(1, 2)), SameRow([0.2, 0.3, 0.5]), Heads())


def test_transport_refuses_what_it_cannot_solve(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = QRow(np.array([1, 2]), np.array([0.4, 0.4]))
    tree = tree_of(Draw(1, 1, lacking), Draw(2, 2, lacking.without(1)), tokens=(1, 2))
    with pytest.raises(UnsupportedDraws, match="may propose nothing"):
        Transport().verify(tree, SameRow([0.2, 0.3, 0.5]), Heads())
    with pytest.raises(InputError, match="at most 64 tokens, not 65"):
        Transport().verify(chain(0, [1]), SameRow(np.full(65, 1 / 65)), Heads())
    wide = QRow(np.arange(40), np.full(40, 1 / 40))
    with pytest.raises(InputError, match="fewer draws"):
        Transport().verify(tree_of(*[Draw(0, 1, wide)] * 4, tokens=(0,)), SameRow(np.full(40, 1 / 40)), Heads())
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(MissingExtra, match=r"outrider\[bench\]"):
        Transport().verify(chain(0, [1]), SameRow([0.123, 0.877]), Heads())


def test_traversal_enters_a_child_once_however_often_it_was_drawn() -> None:
    row = QRow(np.array([0, 1]), np.array([0.1, 0.9]))
    tree = tree_of(Draw(1, 1, row), Draw(1, 1, row), Draw(1, 1, row), tokens=(1,))
    probs = verdict_probs(Traversal(), tree, SameRow([0.7, 0.3]))  # a key used twice would raise
    assert sum(p for (path, _), p in probs.items() if path == (1,)) == pytest.approx(0.3 / 0.9)


def test_block_and_traversal_leave_the_rows_of_hopeless_nodes_alone() -> None:
    row = QRow(np.array([1, 2]), np.array([0.5, 0.5]))
    tree = chain(0, [1, 2, 1], [row] * 3)
    for rule in (Block(), Traversal()):
        rows = TableRows(ToyLM(3, seed=1, allowed=(0, 2)), [0], tree)
        assert rule.verify(tree, rows, Heads()).path == ()
        assert set(rows.asked) == {0}  # token 1 is impossible, and so is all below it


@each
def test_a_distribution_that_is_not_honoured_is_refused(verifier: Verifier) -> None:
    case = CASES[0]
    refused = {drawing.law for drawing in DRAWINGS} - verifier.honours
    assert (refused == set()) == (verifier.name == "invariant")
    for drawing in (d for d in DRAWINGS if d.law in refused):
        tree = draw_tree(drawing, (3,), case.draft, case.second, CONTEXT, StreamNoise(1, 0, DRAFT, 0, 0))
        with pytest.raises(UnsupportedDraws):
            verifier.verify(tree, TableRows(case.target, CONTEXT, tree), Heads())


@coupled
def test_a_draw_that_its_row_cannot_have_made_is_refused(verifier: Verifier) -> None:
    row = QRow(np.array([1]), np.array([1.0]))
    with pytest.raises(UnsupportedDraws, match="token 2"):
        verifier.verify(tree_of(Draw(2, 1, row), tokens=(2,)), SameRow([0.2, 0.3, 0.5]), Heads())


@coupled
def test_a_token_of_zero_probability_is_never_accepted(verifier: Verifier) -> None:
    row = QRow(np.array([1, 2]), np.array([0.5, 0.5]))
    tree = chain(0, [1], [row])
    assert verifier.verify(tree, SameRow([0.5, 0.0, 0.5]), Heads()).path == ()


@each
@pytest.mark.parametrize("token", [3, 1000])
def test_tokens_beyond_the_vocabulary_have_no_probability(verifier: Verifier, token: int) -> None:
    row = QRow(np.array([1, token]), np.array([0.25, 0.75]))
    tree = tree_of(Draw(token, NOTHING, row))
    probs = verdict_probs(verifier, tree, SameRow([0.2, 0.3, 0.5]))
    assert all(path == () and next_token < 3 for path, next_token in probs)
    if verifier.coupled:  # norm([p - q]+) = [0.2, 0.05, 0.5] / 0.75
        assert probs[((), 1)] == pytest.approx(0.05 / 0.75)


@coupled
def test_no_proposal_is_a_sure_rejection(verifier: Verifier) -> None:
    row = QRow(np.array([1]), np.array([0.3]))
    probs = verdict_probs(verifier, tree_of(Draw(NOTHING, NOTHING, row)), SameRow([0.5, 0.3, 0.2]))
    assert probs == pytest.approx({((), 0): 5 / 7, ((), 2): 2 / 7})


@coupled
def test_an_accepted_draw_without_a_node_ends_the_path_with_its_token(verifier: Verifier) -> None:
    row = QRow(np.array([1]), np.array([1.0]))
    verdict = verifier.verify(tree_of(Draw(1, NOTHING, row)), SameRow([0.5, 0.3, 0.2]), Heads())
    assert verdict.path == () and verdict.next_token == 1


@pytest.mark.parametrize("verifier", [Invariant(), *SEVERAL], ids=lambda v: v.name)
def test_muting_nodes_of_a_drawn_tree_keeps_the_distribution(verifier: Verifier) -> None:
    case = CASES[0]

    def run(paths: Branches) -> tuple[int, ...]:
        tree = draw_tree(WAYS["iid"], (2, 1), case.draft, case.second, CONTEXT, paths.noise("draft"))
        tree = tree.mute([node for node in range(1, len(tree)) if tree.tokens[node] == 1])
        verdict = verifier.verify(tree, TableRows(case.target, CONTEXT, tree), paths.noise("verify"))
        return (*(int(tree.tokens[node]) for node in verdict.path), verdict.next_token)

    assert distance(outcomes(run), case.target, 3) < 1e-12


def test_the_final_token_descends_into_a_child_that_was_never_tested() -> None:
    row = QRow(np.array([1]), np.array([1.0]))
    tree = tree_of(Draw(1, 1, row), Draw(2, 2, None), tokens=(1, 2))
    probs = verdict_probs(Recursive(), tree, SameRow([0.0, 0.0, 1.0]))
    assert probs == pytest.approx({((2,), 2): 1.0})


def test_repeated_draws_share_a_child_and_are_each_tested() -> None:
    first, second = QRow(np.array([1, 2]), np.array([0.9, 0.1])), QRow(np.array([1, 3]), np.array([0.2, 0.8]))
    tree = tree_of(Draw(2, 1, first), Draw(1, 2, second), Draw(1, 2, first), tokens=(2, 1))
    probs = verdict_probs(Recursive(), tree, SameRow([0.5, 0.3, 0.05, 0.15]))
    # Draw 1: p(2)/q(2) = 1/2. Then [p - q]+ = (0.5, 0, 0, 0.15): token 1 fails twice, the first failure takes all of 3.
    assert sum(p for (path, _), p in probs.items() if path == (1,)) == pytest.approx(0.5)
    assert probs[((), 0)] == pytest.approx(0.5)


@each
def test_greedy_follows_the_argmax_whatever_the_draws(verifier: Verifier) -> None:
    lm = ToyLM(5, seed=11, greedy=True)
    text = [0]
    for _ in range(4):
        text.append(int(lm.probs(text).argmax()))
    wrong = (text[3] + 1) % 5
    row = QRow(np.arange(5), np.full(5, 0.2))
    right = from_paths(0, [text[1:3] + [wrong], text[1:4], [(text[1] + 1) % 5]])
    sampled = TokenTree(
        right.tokens, right.parents, tuple(tuple(Draw(d.token, d.child, row) for d in draws) for draws in right.draws)
    )
    other = tree_of(Draw(text[1], 1, None), Draw(text[1], 1, row), tokens=(text[1],))  # no rule but invariant takes it
    for tree, length in ((right, 3), (sampled, 3), (other, 1), (root(0), 0)):
        rows = TableRows(lm, [0], tree)
        verdict = verifier.verify(tree, rows, Heads())
        assert [int(tree.tokens[i]) for i in verdict.path] + [verdict.next_token] == text[1 : length + 2]
        assert rows.asked == [0, *verdict.path]


@pytest.mark.parametrize(
    "verifier", [v for v in VERIFIERS if v.name not in ("block", "traversal")], ids=lambda v: v.name
)
def test_only_rows_along_the_path_are_asked_for_each_once(verifier: Verifier) -> None:
    lm, draft = ToyLM(3, seed=1), ToyLM(3, seed=2)
    drawing = WAYS["iid"]
    for seed in range(40):
        tree = draw_tree(drawing, SHAPE[verifier.name], draft, draft, [0], StreamNoise(seed, 0, DRAFT, 0, 0))
        rows = TableRows(lm, [0], tree)
        assert rows.asked == []
        verdict = verifier.verify(tree, rows, StreamNoise(seed, 0, VERIFY, 0, 0))
        assert rows.asked == [0, *verdict.path]


def test_invariant_says_the_same_text_with_any_tree_or_none() -> None:
    lm = ToyLM(4, seed=1)
    for seed in range(30):
        plain = [0]
        for position in range(1, 5):
            noise = StreamNoise(seed, 0, VERIFY, text_hash(plain), position)
            rows = TableRows(lm, list(plain), root(plain[-1]))
            plain.append(Invariant().verify(root(plain[-1]), rows, noise).next_token)
        trees = [
            chain(0, plain[1:4]),
            from_paths(0, [[0, 1], [1, 2], plain[1:3]]),
            fixed(np.array([0, 3]), np.array([-1, 0])),
        ]
        for tree in trees:
            verdict = Invariant().verify(
                tree, TableRows(lm, [0], tree), StreamNoise(seed, 0, VERIFY, text_hash([0]), 1)
            )
            said = [int(tree.tokens[i]) for i in verdict.path] + [verdict.next_token]
            assert said == plain[1 : 1 + len(said)]


@pytest.mark.parametrize(
    "verifier", [v for v in COUPLED if v.name != "transport"], ids=lambda v: v.name
)  # tosses no coin
def test_a_rejection_that_only_rounding_made_leaves_the_targets_distribution(verifier: Verifier) -> None:
    p = torch.tensor([0.25, 0.75], dtype=torch.float32)
    row = QRow(np.array([0, 1]), np.array([0.25, 0.75]) * (1 + 1e-12))
    left, mass = after_rejection(p, 1.0, row)
    assert left is p and mass == 1.0
    assert verifier.verify(chain(0, [1], [row]), SameRow([0.25, 0.75], torch.float32), Tails()).next_token == 0


@coupled
def test_the_targets_row_is_not_written_to(verifier: Verifier) -> None:
    rows = SameRow([0.2, 0.3, 0.5])
    before = rows.row.clone()
    verifier.verify(chain(0, [1], [QRow(np.array([1, 2]), np.array([0.9, 0.1]))]), rows, Tails())
    assert torch.equal(rows.row, before)


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_real_noise_gives_the_targets_distribution(verifier: Verifier, dtype: torch.dtype) -> None:
    """Chi-square of two tokens over fixed seeds, at a false-alarm rate of 1e-4."""
    lm, draft, count = ToyLM(3, seed=1), ToyLM(3, seed=2), 2000
    shape = (SHAPE[verifier.name][0], 1)
    seen = np.zeros((3, 3))
    for seed in range(count):
        tree = draw_tree(WAYS["iid"], shape, draft, draft, [0], StreamNoise(seed, 0, DRAFT, 0, 1))
        rows = TableRows(lm, [0], tree, dtype)
        verdict = verifier.verify(tree, rows, StreamNoise(seed, 0, VERIFY, 0, 1))
        said = [int(tree.tokens[i]) for i in verdict.path] + [verdict.next_token]
        if len(said) == 1:  # completed by plain decoding, a step later
            bare = root(said[0])
            noise = StreamNoise(seed, 0, VERIFY, 1, 2)
            said.append(Invariant().verify(bare, TableRows(lm, [0, said[0]], bare, dtype), noise).next_token)
        seen[said[0], said[1]] += 1
    expected = count * np.array([lm.probs([0])[a] * lm.probs([0, a]) for a in range(3)])
    assert ((seen - expected) ** 2 / expected).sum() < 31.83  # chi-square, 8 degrees of freedom, upper 1e-4
