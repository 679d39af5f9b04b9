"""Trees of guesses and prompt rows: as good as trying all, within the rows, and worth what they are said to be."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.grow import sparse_states as made
from outrider.grow.sparse_states import State, best_paths, best_rows, sparse_states


def some_rates(seed: int, prompts: int = 3, ranks: int = 4) -> np.ndarray:
    make = np.random.default_rng(seed)
    rates = np.sort(make.dirichlet(np.ones(ranks + 1), prompts)[:, :-1], axis=1)[:, ::-1]
    return rates * np.linspace(1, 0.6, prompts)[:, None]


def worth(paths: set[tuple[int, ...]], rates: np.ndarray) -> float:
    return sum(float(np.prod([rates[depth, rank] for depth, rank in enumerate(path)])) for path in paths)


@pytest.mark.parametrize("seed", range(4))
def test_the_paths_are_the_best_prefix_closed_ones(seed: int) -> None:
    rates, depth = some_rates(seed, 3, 2)[:, np.random.default_rng(seed).permutation(2)], 3
    every = [path for length in range(1, depth + 1) for path in product(range(2), repeat=length)]
    for count in (1, 2, 4, 5):
        found = best_paths(rates, depth, count)
        assert all(path[:-1] in {(), *(p for p, _ in found[:at])} for at, (path, _) in enumerate(found))
        closed = [
            {path for bit, path in enumerate(every) if chosen >> bit & 1}
            for chosen in range(1 << len(every)) if chosen.bit_count() == count
        ]  # fmt: skip
        best = max(worth(paths, rates) for paths in closed if all(p[:-1] in paths or len(p) == 1 for p in paths))
        assert sum(chance for _, chance in found) == pytest.approx(best) == worth({p for p, _ in found}, rates)


@given(st.integers(0, 10_000), st.integers(1, 20), st.integers(1, 3))
def test_no_state_needs_more_rows_than_there_are(seed: int, rows: int, members: int) -> None:
    rates = some_rates(seed)
    found = sparse_states(rates, rows, members)
    assert len(found.states) == 4 and found.shares.sum() == pytest.approx(1) and found.tokens >= 1
    for number, state in enumerate(found.states):
        assert len(state.paths) + members * int(state.prompts.sum()) <= rows
        assert state.prompts.max() <= 3 and state.prompts.min() >= 0
        assert all(len(path) <= number for path in state.paths)
        assert state.stops.sum() == pytest.approx(1) and (state.stops > -1e-9).all()


@pytest.mark.parametrize(("seed", "rows"), [(0, 5), (1, 6), (2, 7), (3, 7)])
def test_numbers_of_candidates_are_as_good_as_when_all_are_tried(seed: int, rows: int) -> None:
    rates = some_rates(seed)
    ways = [best_paths(rates, depth, rows - 1) for depth in range(4)]
    every = product([0], *(range(len(way) + 1) for way in ways[1:]))
    best = max(made._chain(ways, sizes, rows, 1).tokens for sizes in every)
    assert sparse_states(rates, rows).tokens >= best - 0.01


def simulated(states: tuple[State, ...], rates: np.ndarray, steps: int) -> float:
    """Tokens a step where each rank is right as often as its rate says, whatever the others were."""
    make, state, tokens = np.random.default_rng(0), 0, 0
    for _ in range(steps):
        tree = states[state]
        place, node = {(): 0} | {path: at for at, path in enumerate(tree.paths, 1)}, ()
        while len(node) < state:
            draw = make.random() - np.cumsum(rates[len(node)])
            right = int(np.argmax(draw < 0)) if draw[-1] < 0 else -1
            if (*node, right) not in place:
                break
            node = (*node, right)
        tokens += len(node) + 1
        state = int(tree.prompts[place[node]])
    return tokens / steps


@pytest.mark.parametrize("rows", [4, 12])
def test_tokens_a_step_are_those_of_independent_guesses(rows: int) -> None:
    rates = some_rates(5)
    found = sparse_states(rates, rows)
    assert simulated(found.states, rates, 20_000) == pytest.approx(found.tokens, rel=0.02)


def test_prompts_behind_nodes_where_no_step_stops_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: rows go where steps come past, not where they stop."""
    rates, right = some_rates(5), sparse_states(some_rates(5), 8).tokens
    state = made._state
    monkeypatch.setattr(
        made, "_state", lambda tree, gains, room: state(tree, -gains, room)  # the most useful prompts go first
    )  # fmt: skip
    assert sparse_states(rates, 8).tokens < 0.97 * right


def test_the_number_of_rows_follows_what_steps_cost() -> None:
    rates, choices = some_rates(2), (3, 6, 12, 24)
    assert best_rows(rates, 1, choices, lambda rows: 1.0)[0] == 24
    assert best_rows(rates, 1, choices, lambda rows: 1.0 + rows)[0] == 3
