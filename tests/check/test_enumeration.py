"""The kit itself: known distributions come out right, misuse of noise is an error, and planted bugs are caught."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.check.drawings import DRAWINGS, Drawing, DrawnTokens, Sample, draw_tree
from outrider.check.enumeration import Branches, HiddenRandomness, ReusedNoise, branches, outcomes
from outrider.check.exhaustive import CASES, CONTEXT, examine, exhaustive, plain_distribution
from outrider.check.toy import TableRows, ToyLM
from outrider.core.errors import InputError
from outrider.core.noise import text_hash
from outrider.core.protocols import Noise, Rows
from outrider.core.records import Verdict
from outrider.core.tree import NOTHING, Draw, Law, QRow, TokenTree
from outrider.verify.recursive import Recursive
from outrider.verify.residual import accept_ratio, after_rejection
from outrider.verify.walk import follow

GENERIC = CASES[0]
WAYS = {drawing.name: drawing for drawing in DRAWINGS}


def test_two_coins_have_the_distribution_of_two_coins() -> None:
    probs = outcomes(lambda paths: paths.noise().coin(0.25, 0, 0) + paths.noise().coin(0.5, 0, 1))
    assert probs == pytest.approx({0: 0.375, 1: 0.5, 2: 0.125})


def test_a_process_that_stops_at_random_has_its_distribution() -> None:
    def tails_before_heads(paths: Branches) -> int:
        noise = paths.noise()
        return next((i for i in range(5) if noise.coin(0.5, 0, i)), 5)

    assert outcomes(tails_before_heads) == pytest.approx({i: 0.5 ** min(i + 1, 5) for i in range(6)})


def test_draws_and_picks_follow_their_weights_and_never_what_has_none() -> None:
    weights = np.array([0.0, 3.0, 1.0])
    assert outcomes(lambda paths: paths.noise().draw(weights, 0, 0)) == pytest.approx({1: 0.75, 2: 0.25})
    assert outcomes(lambda paths: paths.noise().pick(torch.tensor(weights) / 4, ())) == pytest.approx(
        {1: 0.75, 2: 0.25}
    )
    assert outcomes(lambda paths: paths.noise().coin(0.0, 0, 0)) == {False: 1.0}


def test_plain_decoding_of_a_toy_model_has_the_product_distribution() -> None:
    lm = ToyLM(3, seed=4)

    def plain(paths: Branches) -> tuple[int, ...]:
        text = list(CONTEXT)
        for _ in range(3):
            noise = paths.noise(text=text_hash(text), position=len(text))
            text.append(noise.pick(torch.tensor(lm.probs(text)), ()))
        return tuple(text[len(CONTEXT) :])

    probs = outcomes(plain)
    assert len(probs) == 27 and probs == pytest.approx(plain_distribution(lm, 3))


def test_one_key_for_two_decisions_is_an_error_within_a_step_only() -> None:
    def reuse(paths: Branches) -> None:
        paths.noise("draft").coin(0.5, 0, 0)
        paths.noise("verify").coin(0.5, 0, 0)
        paths.noise("verify", text=1).coin(0.5, 0, 0)
        paths.noise("verify").draw(np.ones(2), 0, 0)

    with pytest.raises(ReusedNoise, match="verify"):
        outcomes(reuse)


def test_the_targets_noise_behind_one_text_is_for_one_token() -> None:
    def after(paths: Branches, text: list[int], path: list[int]) -> int:
        return paths.noise(text=text_hash(text), position=len(text)).pick(torch.ones(2), path)

    with pytest.raises(ReusedNoise, match="target"):
        outcomes(lambda paths: (after(paths, [4, 5, 6], [7]), after(paths, [4, 5, 6, 7], [])))
    probs = outcomes(lambda paths: (after(paths, [4, 5, 6], [7]), after(paths, [4, 5, 6], [8])))
    assert set(probs.values()) == {0.25}


def test_a_key_that_may_come_again_brings_the_bits_of_the_first_time() -> None:
    def coins(paths: Branches) -> tuple[bool, bool]:
        return paths.noise().coin(0.25, 0, 0), paths.noise().coin(0.5, 0, 0)

    assert outcomes(coins, shared=True) == pytest.approx({(True, True): 0.25, (False, True): 0.25, (False, False): 0.5})

    def draws(paths: Branches) -> tuple[int, int, int]:
        weights = np.array([1.0, 3.0]), np.array([0.0, 1.0, 1.0]), np.array([1.0, 1.0, 2.0])
        return tuple(paths.noise().draw(row, 0, 0) for row in weights)

    want = {(0, 1, 0): 0.25, (1, 1, 1): 0.25, (1, 2, 2): 0.5}
    assert outcomes(draws, shared=True) == pytest.approx(want)

    def both(paths: Branches) -> tuple[bool, int]:
        return paths.noise().coin(0.5, 0, 0), paths.noise().draw(np.ones(2), 0, 0)

    assert set(outcomes(both, shared=True).values()) == {0.25}  # as with the real streams, a coin and a draw differ


def test_randomness_from_elsewhere_is_an_error() -> None:
    hidden = iter(range(10))

    def other_key(paths: Branches) -> bool:
        return paths.noise().coin(0.5, next(hidden), 0)

    def other_length(paths: Branches) -> None:
        for i in range(2 - next(hidden) % 2):
            paths.noise().coin(0.5, 0, i)

    with pytest.raises(HiddenRandomness):
        outcomes(other_key)
    hidden = iter(range(10))
    with pytest.raises(HiddenRandomness):
        outcomes(other_length)


def test_too_many_outcomes_are_refused_not_cut() -> None:
    with pytest.raises(InputError, match="more than 10"):
        list(branches(lambda paths: [paths.noise().coin(0.5, 0, i) for i in range(4)], limit=10))


def test_cases_that_differ_in_their_target_share_the_trees_of_their_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, right = Counter[tuple[ToyLM, ToyLM]](), draw_tree

    def noted(drawing: Drawing, shape: tuple[int, ...], draft: ToyLM, second: ToyLM, *more: Any) -> TokenTree:
        drawn[draft, second] += 1
        return right(drawing, shape, draft, second, *more)

    monkeypatch.setattr("outrider.check.exhaustive.draw_tree", noted)
    results = exhaustive(Recursive(), [Law.IID], shapes=[(1, 1)], drawings=[WAYS["iid"]])
    assert [r.case for r in results] == [case.name for case in CASES] and all(r.passed for r in results)
    assert set(drawn) == {(case.draft, case.second) for case in CASES}
    assert drawn[GENERIC.draft, GENERIC.second] == 9  # each pair of tokens once, for five targets


@pytest.mark.parametrize("drawing", DRAWINGS, ids=lambda d: d.name)
def test_drawings_make_the_laws_that_they_are_named_after(drawing: Drawing) -> None:
    def run(paths: Branches) -> TokenTree:
        return draw_tree(drawing, (3,), GENERIC.draft, GENERIC.second, CONTEXT, paths.noise())

    for tree, _ in branches(run):
        taken = [d.token for d in tree.draws[0][:-1] if d.token != NOTHING]  # what later rows could be short of
        assert tree.law(0) is drawing.law or (drawing.law is Law.WITHOUT_REPLACEMENT and not taken)


def test_the_second_draw_without_replacement_has_the_reduced_distribution() -> None:
    def run(paths: Branches) -> tuple[int, ...]:
        tree = draw_tree(WAYS["without replacement"], (2,), GENERIC.draft, GENERIC.second, CONTEXT, paths.noise())
        return tuple(d.token for d in tree.draws[0])

    q = GENERIC.draft.probs(CONTEXT)
    assert outcomes(run) == pytest.approx(
        {(a, b): q[a] * q[b] / (1 - q[a]) for a in range(3) for b in range(3) if a != b}
    )


# Planted bugs. Each is the recursive rule with one thing wrong.

Choose = Callable[[Tensor, tuple[Draw, ...], int, Noise], int]


class Broken(Recursive):
    def __init__(self, choose: Choose) -> None:
        self.choose = choose

    def verify(self, tree: TokenTree, rows: Rows, noise: Noise) -> Verdict:
        return follow(tree, lambda node: self.choose(rows.probs(node), tree.draws[node], node, noise))


def faithful(
    p: Tensor,
    draws: tuple[Draw, ...],
    node: int,
    noise: Noise,
    reject: Callable[[Tensor, float, QRow], tuple[Tensor, float]] = after_rejection,
    final_key: int | None = None,
) -> int:
    left, mass = p, 1.0
    for j, draw in enumerate(draws):
        if draw.row is not None:
            accept = accept_ratio(left, mass, draw) if draw.token != NOTHING else 0.0
            if accept > 0 and noise.coin(accept, node, j):
                return draw.token
            left, mass = reject(left, mass, draw.row)
    return noise.draw(left, node, len(draws) if final_key is None else final_key)


def corrects_from_p(p: Tensor, draws: tuple[Draw, ...], node: int, noise: Noise) -> int:
    """The residual forgotten: a rejection is corrected from p."""
    return faithful(p, draws, node, noise, reject=lambda left, mass, row: (p, 1.0))


def forgets_the_last_sibling(p: Tensor, draws: tuple[Draw, ...], node: int, noise: Noise) -> int:
    """The residual of the last rejection forgotten."""
    rejections = 0

    def reject(left: Tensor, mass: float, row: QRow) -> tuple[Tensor, float]:
        nonlocal rejections
        rejections += 1
        return (left, mass) if rejections == len(draws) else after_rejection(left, mass, row)

    return faithful(p, draws, node, noise, reject)


def takes_the_first_row_for_all(p: Tensor, draws: tuple[Draw, ...], node: int, noise: Noise) -> int:
    """E1: draws without replacement tested as if they were independent."""
    return faithful(p, tuple(d._replace(row=draws[0].row) for d in draws), node, noise)


def skips_no_proposal(p: Tensor, draws: tuple[Draw, ...], node: int, noise: Noise) -> int:
    """E5: a draw that proposed nothing is taken for no draw."""
    return faithful(p, tuple(d for d in draws if d.token != NOTHING), node, noise)


def skips_the_nodeless(p: Tensor, draws: tuple[Draw, ...], node: int, noise: Noise) -> int:
    """E5: a draw whose token stands in no node is taken for no draw."""
    return faithful(p, tuple(d for d in draws if d.child != NOTHING), node, noise)


def drops_duplicates(p: Tensor, draws: tuple[Draw, ...], node: int, noise: Noise) -> int:
    """E7: multiplicity lost."""
    return faithful(p, tuple({d.token: d for d in reversed(draws)}.values())[::-1], node, noise)


def never_normalises(p: Tensor, draws: tuple[Draw, ...], node: int, noise: Noise) -> int:
    """The second ratio taken against a residual that does not sum to 1."""
    return faithful(p, draws, node, noise, reject=lambda left, mass, row: (after_rejection(left, 1.0, row)[0], 1.0))


@pytest.mark.parametrize(
    ("bug", "way", "shape"),
    [
        (corrects_from_p, "iid", (1, 1, 1)),
        (forgets_the_last_sibling, "iid", (2, 1)),
        (takes_the_first_row_for_all, "without replacement", (2, 1)),
        (skips_no_proposal, "iid, some propose nothing", (2, 1)),
        (skips_the_nodeless, "iid, token 0 in no node", (2, 1)),
        (drops_duplicates, "iid", (2, 1)),
        (never_normalises, "iid", (3, 1)),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_a_planted_bug_shows_in_the_output_distribution(bug: Choose, way: str, shape: tuple[int, ...]) -> None:
    assert examine(Broken(faithful), WAYS[way], shape, GENERIC).passed
    assert examine(Broken(bug), WAYS[way], shape, GENERIC).difference > 0.01


def test_a_bonus_token_from_the_residual_is_caught() -> None:
    class BonusFromResidual(Recursive):
        """After full acceptance the last token comes from the residual of the node above."""

        def verify(self, tree: TokenTree, rows: Rows, noise: Noise) -> Verdict:
            verdict = super().verify(tree, rows, noise)
            if len(verdict.path) < tree.depth:
                return verdict
            above = int(tree.parents[verdict.path[-1]])
            row = tree.draws[above][0].row
            assert row is not None
            left, _ = after_rejection(rows.probs(above), 1.0, row)
            return Verdict(verdict.path, noise.draw(left, 99, 0))

    assert examine(BonusFromResidual(), WAYS["iid"], (1, 1), GENERIC).difference > 0.01


def test_a_decision_for_each_path_instead_of_each_node_is_caught() -> None:
    class LongestPath(Recursive):
        """E6: every root-to-leaf path is sampled on its own and the longest match is kept."""

        def verify(self, tree: TokenTree, rows: Rows, noise: Noise) -> Verdict:
            leaves = [i for i in range(len(tree)) if not tree.children(i)]
            best = Verdict((), -1)
            for row, leaf in enumerate(leaves):
                path: list[int] = []
                for node, after in zip([0, *tree.path(leaf)], [*tree.path(leaf), NOTHING], strict=True):
                    token = noise.draw(rows.probs(node), node, row)
                    if after == NOTHING or token != tree.tokens[after]:
                        break
                    path.append(after)
                if row == 0 or len(path) > len(best.path):
                    best = Verdict(tuple(path), token)
            return best

    assert examine(LongestPath(), WAYS["fixed"], (2, 1), GENERIC).difference > 0.01
    assert examine(LongestPath(), WAYS["fixed"], (1, 1, 1), GENERIC).passed  # one path: nothing to tell apart


def test_dropping_an_unlikely_draw_is_caught() -> None:
    def drop_unlikely(first: QRow, second: QRow, count: int, sample: Sample) -> DrawnTokens:
        """E5: what was drawn decides whether it is proposed."""
        draws: DrawnTokens = [(sample(first), first) for _ in range(count)]
        return [(token, row) for token, row in draws if first.prob(token) >= 0.4]

    for shape in ((1, 1), (2, 1)):
        assert examine(Recursive(), Drawing("drops", Law.IID, drop_unlikely), shape, GENERIC).difference > 0.01


def test_accepting_by_u_not_above_the_ratio_is_caught() -> None:
    class ZeroUniform:
        """u is exactly 0 and heads means u <= p: the one outcome of probability 0 that enumeration leaves out."""

        def coin(self, p: float, node: int, draw: int) -> bool:
            return p >= 0.0

        def draw(self, weights: Tensor, node: int, draw: int) -> int:
            return int(weights.argmax())

        def pick(self, probs: Tensor, path: Sequence[int]) -> int:
            return int(probs.argmax())

    def no_guard(p: Tensor, draws: tuple[Draw, ...], node: int, noise: Noise) -> int:
        for j, draw in enumerate(draws):
            if noise.coin(accept_ratio(p, 1.0, draw), node, j):
                return draw.token
        return noise.draw(p, node, len(draws))

    def says(verifier: Recursive) -> float:
        """Probability, to the target, of the first token said."""
        case = next(c for c in CASES if c.name == "q disjoint from p")
        draft = Branches().noise()
        tree = draw_tree(WAYS["iid"], (1,), case.draft, case.second, CONTEXT, draft)
        verdict = verifier.verify(tree, TableRows(case.target, CONTEXT, tree), ZeroUniform())
        first = int(tree.tokens[verdict.path[0]]) if verdict.path else verdict.next_token
        return float(case.target.probs(CONTEXT)[first])

    assert says(Broken(no_guard)) == 0.0
    assert says(Recursive()) > 0.0


def test_a_rule_that_reuses_a_coins_noise_is_caught() -> None:
    def reuse(p: Tensor, draws: tuple[Draw, ...], node: int, noise: Noise) -> int:
        return faithful(p, draws, node, noise, final_key=0)

    with pytest.raises(ReusedNoise):
        examine(Broken(reuse), WAYS["iid"], (1, 1), GENERIC)
