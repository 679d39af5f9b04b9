"""How long a chain should be: what was shown is learnt, time counts, and the paper's objective does without it."""

from __future__ import annotations

import numpy as np
import pytest

from outrider.control.gamma import LENGTHS, GammaLength, examples
from outrider.core.errors import InputError
from outrider.core.tree import QRow
from outrider.grow.stopping import Drafted, Ladder, sureness

EASY, HARD = 0.95, 0.35  # acceptance of a token; the drafter is as sure
STEP = 0.030  # seconds of a step of few rows


def features(sure: float) -> np.ndarray:
    return np.array([1 - sure, 1 - sure + 0.05, sure, sure - 0.05])


def chain(rng: np.random.Generator, accept: float) -> int:
    """Tokens of a whole chain that stand."""
    stands = rng.random(LENGTHS[-1]) < accept
    return int(stands.argmin()) if not stands.all() else LENGTHS[-1]


def taught(draft: float = 0.004, step=lambda rows: STEP, chains: int = 600, **options) -> GammaLength:
    """Half of the text is easy, half is hard."""
    rng, made = np.random.default_rng(1), GammaLength(step, lambda: draft, **options)
    for _ in range(chains):
        sure = rng.choice([EASY, HARD]) + rng.normal(0, 0.02)
        made.observe([features(sure + rng.normal(0, 0.02)) for _ in LENGTHS], chain(rng, sure))
    return made


def best(accept: float, drafted: int, draft: float, step: float) -> int:
    """From the truth: tokens a second of every length in reach."""

    def rate(length: int) -> float:
        return (1 + sum(accept**i for i in range(1, length + 1))) / (length * draft + step)

    return max((length for length in LENGTHS if length >= drafted), key=rate)


def test_what_it_chooses_is_best_nearly_always() -> None:
    draft = 0.006
    made, rng = taught(draft, chains=1200), np.random.default_rng(5)
    right = 0
    for _ in range(200):
        sure = rng.choice([EASY, HARD]) + rng.normal(0, 0.01)
        right += made.length(features(sure), 2) == best(sure, 2, draft, STEP)
    assert right >= 180


def test_time_shortens_chains_and_the_papers_objective_never_does() -> None:
    for draft, expected in ((0.0005, LENGTHS[-1]), (0.05, LENGTHS[0])):
        assert taught(draft).length(features(0.9), 2) == expected
        assert taught(draft, paper=True).length(features(0.9), 2) == LENGTHS[-1]
    assert taught(0.05).length(features(0.9), 6) == 6  # what is drafted is drafted


def test_another_precision_takes_other_times_and_so_other_lengths() -> None:
    """A step in few bits costs more with every row: the same text deserves a shorter chain there."""
    flat, steep = taught(0.002), taught(0.002, lambda rows: 0.01 + 0.01 * rows, precision="int4")
    assert flat.length(features(0.9), 2) > steep.length(features(0.9), 2)


def test_it_is_faster_than_any_single_length_where_text_is_easy_and_hard() -> None:
    draft = 0.01
    made, rng = taught(draft), np.random.default_rng(9)
    tokens, seconds = dict.fromkeys((0, *LENGTHS), 0.0), dict.fromkeys((0, *LENGTHS), 0.0)
    for _ in range(4000):
        sure = float(rng.choice([EASY, HARD]))
        stood = chain(rng, sure)
        for way in tokens:  # 0: as it chooses
            length = way or made.length(features(sure), 2)
            tokens[way] += 1 + min(stood, length)
            seconds[way] += length * draft + STEP
    rates = {way: tokens[way] / seconds[way] for way in tokens}
    assert rates[0] > 1.02 * max(rates[length] for length in LENGTHS)


def test_a_chain_teaches_every_length_from_every_rung() -> None:
    row = np.concatenate([*(np.full(4, float(n)) for n in LENGTHS), [2.0, 5.0]])  # int4, five stood
    x, y = examples(row[None])
    assert len(x) == 10 and set(x[:, 4]) == {2.0}
    found = {(int(drafted), int(length)): share for drafted, length, share in zip(x[:, 5], x[:, 6], y, strict=True)}
    assert found[2, 4] == 1.0 and found[2, 8] == 5 / 8 and found[6, 6] == 5 / 6 and (4, 2) not in found
    assert all(np.array_equal(known[:4], np.full(4, known[5])) for known in x)  # of so many tokens, no later ones


def test_what_was_shown_outlives_the_run_and_can_be_forgotten() -> None:
    made = taught(0.01, chains=200)
    again = GammaLength(lambda rows: STEP, lambda: 0.01)
    assert again.takes_whole() and again.length(features(HARD), 2) == LENGTHS[-1]  # nothing is known yet
    again.remember(made.memory())
    assert again.length(features(HARD), 2) == made.length(features(HARD), 2) == LENGTHS[0]
    again.forget()
    assert not again.memory() and again.length(features(HARD), 2) == LENGTHS[-1]
    with pytest.raises(InputError, match="another form"):
        again.remember({"chains": np.zeros((3, 5))})


# The ladder, which asks it

SURE, UNSURE = (QRow(np.arange(4), np.array([0.97, 0.01, 0.01, 0.01])), QRow(np.arange(4), np.full(4, 0.25)))


class Asked:
    """Lengths by the mean confidence, and what was asked."""

    def __init__(self, whole: bool = False) -> None:
        self.whole, self.at, self.seen = whole, list[int](), list[tuple[int, int]]()

    def takes_whole(self) -> bool:
        return self.whole

    def length(self, known: np.ndarray, drafted: int) -> int:
        self.at.append(drafted)
        return 8 if known[2] > 0.7 else drafted

    def observe(self, known, accepted: int) -> None:
        self.seen.append((len(known), accepted))


def drafted_with(rows: list[QRow], asked: Asked) -> Drafted:
    ladder, drafted = Ladder(asked), Drafted()
    for row in rows:
        drafted.rows.append(row)
        if not ladder.goes_on(drafted):
            break
    ladder.observe(drafted, 3)
    return drafted


def test_rungs_decide_by_the_tokens_so_far_and_by_no_later_ones() -> None:
    asked = Asked()
    assert len(drafted_with([SURE] * 2 + [UNSURE] * 8, asked).rows) == 4 and asked.at == [2, 4] and not asked.seen
    for rest in ([SURE] * 6, [UNSURE] * 6):
        assert len(drafted_with([UNSURE] * 2 + rest, asked := Asked()).rows) == 2 and asked.at == [2]
    assert len(drafted_with([SURE] * 10, asked := Asked()).rows) == 8 and asked.seen == [(4, 3)]


def test_a_whole_chain_asks_nobody_and_is_learnt_from() -> None:
    asked = Asked(whole=True)
    assert len(drafted_with([UNSURE] * 10, asked).rows) == 8
    assert not asked.at and asked.seen == [(4, 3)]


def test_sureness_is_of_the_rows_natural_entropy_and_their_largest_chance() -> None:
    mean, largest, top, least = sureness([SURE, UNSURE])
    assert largest == pytest.approx(np.log(4)) and least == 0.25 and top == pytest.approx((0.97 + 0.25) / 2)
    assert mean == pytest.approx((np.log(4) - (0.97 * np.log(0.97) + 0.03 * np.log(0.01))) / 2)
