"""DiffuSpec's trigrams: what they know of a text, whose they are, and that they help the path they are asked about."""

from __future__ import annotations

import numpy as np
import pytest

from outrider.api import Outrider
from outrider.core.errors import InputError
from outrider.core.sampling import SamplingParams
from outrider.core.tree import QRow
from outrider.draft.block.diffuspec import DiffuSpec, DiffuSpecSource, Trigrams
from outrider.draft.marginals import Marginals
from outrider.grow.block.lattice import Lattice
from tests.draft.toy_loop import history
from tests.drafters import drafter, some_text

V = 8


def chances(trigrams: Trigrams, text: list[int], owner: int = 0) -> list[float]:
    window = np.array([-1, -1, -1, -1, *text])[-4:]
    return np.exp(trigrams.logs(owner, window, np.arange(V))).tolist()


def test_chances_are_shares_of_what_came_after_two_tokens_and_after_one() -> None:
    trigrams = Trigrams(V, 1 << 18)
    assert chances(trigrams, [1, 2]) == pytest.approx([1 / V] * V)
    text = np.array([1, 2, 3, 1, 2, 4, 5, 2, 3])
    trigrams.learn(0, text, 0)
    after = chances(trigrams, [1, 2])
    assert sum(after) == pytest.approx(1)
    assert after[3] == pytest.approx(0.65 / 2 + 0.25 * 2 / 3 + 0.1 / V)
    assert after[4] == pytest.approx(0.65 / 2 + 0.25 * 1 / 3 + 0.1 / V)
    assert chances(trigrams, [7, 2])[3] == pytest.approx(0.25 * 2 / 3 + 0.75 / V)  # nothing of these two


def test_learning_a_text_as_it_grows_is_learning_it_at_once() -> None:
    rng = np.random.default_rng(0)
    text = rng.integers(0, V, 40)
    once, grown = Trigrams(V, 1 << 18), Trigrams(V, 1 << 18)
    once.learn(0, text, 0)
    known = 0
    for end in (1, 2, 3, 17, 18, 40):
        grown.learn(0, text[:end], known)
        known = end
    for first in range(V):
        for second in range(V):
            assert chances(once, [first, second]) == pytest.approx(chances(grown, [first, second]), abs=1e-6)


class Known(Marginals):
    name, needs = "known", None

    def begin(self, slot, context) -> None: ...
    def end(self, slot) -> None: ...
    def marginals(self, slots):
        row = QRow(np.array([0, 1]), np.array([0.6, 0.4]))
        return [[row, row, row] for _ in slots]


def source(scope: str = "shared") -> DiffuSpecSource:
    return DiffuSpecSource(Known(), Trigrams(V, 1 << 18), scope)  # type: ignore[arg-type]


def test_a_text_that_runs_teaches_the_path_that_it_takes() -> None:
    made = source()
    made.begin(3, history([0, 1, 0, 1, 0, 1, 0], V))
    search = Lattice(frozenset(), share=0.5)
    assert search.search(search.places(made.marginals([3])[0]), made.following(3)) == (1, 0, 1)
    plain = Lattice(frozenset(), share=1.0)
    assert plain.search(plain.places(made.marginals([3])[0]), made.following(3)) == (0, 0, 0)


@pytest.mark.parametrize("scope", ["shared", "private"])
def test_what_a_private_request_teaches_no_other_learns(scope: str) -> None:
    made = source(scope)
    made.begin(0, history([5, 6, 7, 5, 6, 7], V))
    made.following(0)
    made.begin(1, history([5, 6], V))
    knows = float(np.exp(made.following(1)([], np.array([7]))[0])) > 0.5
    assert knows == (scope == "shared")


def test_its_memory_can_be_kept_and_forgotten_and_one_of_another_vocabulary_is_refused() -> None:
    one, other = DiffuSpec(source(), Lattice(frozenset())), DiffuSpec(source(), Lattice(frozenset()))  # type: ignore[arg-type]
    one.trigrams.learn(0, np.array([1, 2, 3, 1, 2, 3]), 0)
    other.remember(one.memory())
    assert chances(other.trigrams, [1, 2]) == chances(one.trigrams, [1, 2])
    other.forget()
    assert chances(other.trigrams, [1, 2]) == pytest.approx([1 / V] * V)
    with pytest.raises(InputError, match="another vocabulary"):
        DiffuSpec(DiffuSpecSource(Known(), Trigrams(2, 1 << 18)), Lattice(frozenset())).remember(one.memory())  # type: ignore[arg-type]


def test_greedy_text_is_the_targets_with_any_length_of_drafts_and_either_kind(tiny_llama, tmp_path) -> None:
    text = some_text(tiny_llama, tmp_path / "text")
    with Outrider(tiny_llama, "plain", strict=True) as engine:
        params = SamplingParams(max_new_tokens=24)
        (plain,) = (engine.engine.submit([1, 2, 3], params, engine.recipe("plain")).result() for _ in range(1))
        for kind in ("deer", "dflash"):
            folder = drafter(kind, tiny_llama, text, tmp_path / kind, block=6)
            for controller in ("adaptive", "fixed"):
                recipe = engine.recipe("diffuspec", {"drafter": str(folder), "controller": controller})
                result = engine.engine.submit([1, 2, 3], params, recipe).result()
                assert result.token_ids == plain.token_ids and result.stats.drafted > 10
        with pytest.raises(InputError, match="of kind medusa; use one of deer, dflash"):
            engine.recipe("diffuspec", {"drafter": str(drafter("medusa", tiny_llama, text, tmp_path / "medusa"))})
