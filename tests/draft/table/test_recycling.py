"""Token Recycling: rows as the target last gave them, trees as a plain oracle walks them, exact, bounded, private."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.api import Outrider
from outrider.check.toy import ToyLM, ToyTarget
from outrider.control.fixed import Fixed
from outrider.core.engine import Engine
from outrider.core.errors import InputError
from outrider.core.protocols import Recipe
from outrider.core.records import Budget, Chunk, Needs, Scores, StepRecord, Verdict
from outrider.core.sampling import SamplingParams
from outrider.core.tree import fixed
from outrider.draft.table import top_rows as module
from outrider.draft.table.positions import positions
from outrider.draft.table.recycling import Recycling, published
from outrider.draft.table.top_rows import top_rows
from outrider.verify.invariant import Invariant
from outrider.verify.recursive import Recursive
from tests.draft.toy_loop import distribution_gap, history, spelled

V = 11


def random_memory(drafter: Recycling, seed: int, missing: float = 0.3) -> dict[str, np.ndarray]:
    """Rows of distinct successors with falling probabilities, some of them cut short or unknown."""
    source = np.random.default_rng(seed)
    arrays = drafter.memory()
    for row in range(drafter.vocab_size):
        count = min(drafter.successors, drafter.vocab_size)
        count = 0 if source.random() < missing else int(source.integers(1, count + 1))
        probs = np.sort(source.dirichlet(np.ones(drafter.successors)))[::-1][:count]
        arrays["ids"][row] = -1
        arrays["ids"][row, :count] = source.permutation(drafter.vocab_size)[:count]
        arrays["logprobs"][row, :count] = np.log(probs)
    return arrays


def loaded(seed: int, **options) -> Recycling:
    drafter = Recycling(V, **{"successors": 5, **options})
    drafter.remember(random_memory(drafter, seed))
    drafter.begin(0, history([1, 2, seed % V], V))
    return drafter


@given(st.integers(0, 10_000), st.integers(1, 12), st.sampled_from([3, 31, 32, 33, 97]))
def test_top_rows_are_the_sorted_rows_with_ties_to_the_lower_id_on_host_and_device(seed, count, width) -> None:
    source = np.random.default_rng(seed)
    scores = torch.from_numpy(source.integers(-3, 4, (4, width)).astype(np.float32))
    scores[0, source.random(width) < 0.9] = -torch.inf
    scores[0, 0] = 0.0
    scores[1] = -scores[1].abs() - 0.0  # negative zeros are zeros
    order = np.lexsort((np.broadcast_to(np.arange(width), scores.shape), -scores.numpy()))[:, :count]
    want = np.full((4, count), -1)
    want[:, : order.shape[1]] = np.where(np.isneginf(np.take_along_axis(scores.numpy(), order, 1)), -1, order)
    top = top_rows(scores, count)
    assert (top.ids == want).all()
    logprobs = torch.log_softmax(scores, 1).numpy()
    for row in range(4):
        known = top.ids[row] >= 0
        np.testing.assert_allclose(top.logprobs[row, known], logprobs[row, top.ids[row, known]], atol=1e-5)
        assert np.isneginf(top.logprobs[row, ~known]).all()
    ids, values, sums = module._fetch(scores, torch.logsumexp(scores, 1), count)
    assert (ids == top.ids).all()
    np.testing.assert_allclose(values - sums[:, None], top.logprobs, atol=1e-5)


def test_of_a_token_that_occurs_twice_the_later_row_stays() -> None:
    logits = torch.randn(3, V, generator=torch.Generator().manual_seed(1))
    drafter = Recycling(V, successors=4)
    drafter.begin(0, history([3, 5, 3, 7], V))
    drafter.absorb([Chunk(0, 0, [3, 5, 3], Scores(logits))])
    assert drafter.memory()["ids"][3].tolist() == top_rows(logits, 4).ids[2].tolist()
    assert drafter.memory()["ids"][5].tolist() == top_rows(logits, 4).ids[1].tolist()
    assert (drafter.memory()["ids"][7] == -1).all()


def test_rejected_rows_teach_and_the_committed_path_is_written_last() -> None:
    tree = fixed(np.array([2, 4, 6, 4, 9]), np.array([-1, 0, 0, 2, 2]))  # token 4 committed as node 1, rejected as 3
    logits = torch.randn(5, V, generator=torch.Generator().manual_seed(2))
    drafter = Recycling(V, successors=4, learn_prompt=False)
    past = history([2], V)
    drafter.begin(0, past)
    past.append([4, 8])
    drafter.observe([0], [StepRecord(tree, Verdict((1,), 8), (4, 8), Scores(logits))])
    rows, top = drafter.memory()["ids"], top_rows(logits, 4).ids
    assert [rows[token].tolist() for token in (2, 4, 6, 9)] == [top[node].tolist() for node in (0, 1, 2, 4)]


def test_the_published_form_has_the_papers_levels_and_every_budget_cuts_a_tree_from_it() -> None:
    form = published()
    assert np.bincount(form.depths).tolist() == [1, 8, 21, 25, 15, 8, 3]
    assert (form.parents[1:] < np.arange(1, len(form) + 1)).all()
    children = np.bincount(form.parents[1:], minlength=len(form) + 1)
    by_rank = sorted((form.ranks[place], children[place]) for place in range(1, 81) if form.depths[place] == 1)
    assert [int(count) for _, count in by_rank] == [8, 4, 3, 2, 1, 1, 1, 1]


def filled(ids: np.ndarray, tree_of: dict, token: int, path: tuple[int, ...], spelt: tuple[int, ...]) -> set:
    """The recursive oracle: every child place whose successor is known, and all below it."""
    found = set()
    for rank in tree_of.get(path, ()):
        if rank < ids.shape[1] and ids[token, rank] >= 0:
            child = int(ids[token, rank])
            found |= {(*spelt, child)} | filled(ids, tree_of, child, (*path, rank), (*spelt, child))
    return found


@given(st.integers(0, 10_000))
def test_static_trees_equal_the_recursive_oracle(seed: int) -> None:
    source = np.random.default_rng(seed)
    paths, tree_of = [()], {}
    for _ in range(int(source.integers(1, 25))):  # a random shape: the next child of a random place
        parent = paths[int(source.integers(len(paths)))]
        rank = len(tree_of.setdefault(parent, []))
        tree_of[parent].append(rank)
        paths.append((*parent, rank))
    drafter = loaded(seed, shape="static", static=positions(paths[1:]))
    (tree,) = drafter.propose([0], [Budget(64, 64)], [None])
    assert spelled(tree) == filled(drafter.memory()["ids"], tree_of, seed % V, (), ())
    assert (np.diff(tree.weights[[0]]) <= 0).all() and (tree.weights[1:] <= tree.weights[tree.parents[1:]]).all()


@given(st.integers(0, 10_000), st.integers(1, 20), st.integers(1, 5))
def test_adaptive_trees_hold_the_likeliest_paths(seed: int, nodes: int, depth: int) -> None:
    drafter = loaded(seed)
    (tree,) = drafter.propose([0], [Budget(nodes, depth)], [None])
    (whole,) = drafter.propose([0], [Budget(4000, depth)], [None])
    assert tree.candidates == min(nodes, whole.candidates) and tree.depth <= depth
    best = np.sort(whole.weights[1:])[::-1][: tree.candidates]
    np.testing.assert_allclose(np.sort(tree.weights[1:])[::-1], best)
    assert (tree.weights[1:] <= tree.weights[tree.parents[1:]]).all()


@pytest.mark.parametrize("shape", ["adaptive", "static"])
@given(seed=st.integers(0, 10_000))
def test_a_larger_budget_keeps_every_candidate_of_a_smaller_one(shape: str, seed: int) -> None:
    drafter = loaded(seed, shape=shape)
    sizes = [spelled(drafter.propose([0], [Budget(nodes, 6)], [None])[0]) for nodes in (2, 5, 9, 30)]
    assert sizes[0] <= sizes[1] <= sizes[2] <= sizes[3]


STATES = {
    "empty": lambda drafter: None,
    "random": lambda drafter: drafter.remember(random_memory(drafter, 5, missing=0.1)),
}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("shape", ["adaptive", "static"])
@pytest.mark.parametrize("verifier", [Invariant(), Recursive()], ids=lambda v: v.name)
def test_generated_text_has_the_targets_distribution(verifier, shape: str, state: str) -> None:
    def make() -> Recycling:
        drafter = Recycling(3, successors=2, shape=shape)
        STATES[state](drafter)
        return drafter

    assert distribution_gap(make, verifier, Budget(3, 2), ToyLM(3, seed=11)) < 1e-6


def test_a_perfect_bigram_table_is_accepted_down_to_its_depth() -> None:
    """Order-1 chain, deterministic: once every token was seen the matrix is the target."""
    lm = ToyLM(7, seed=3, order=1, greedy=True)
    drafter = Recycling(7, successors=4)
    engine = Engine(ToyTarget(lm), Recipe("toy", drafter, Invariant(), Fixed(Budget(5, 5))), strict=True)
    everything = list(range(7))
    engine.submit([*everything, 0], SamplingParams(max_new_tokens=1)).result()
    result = engine.submit([4, 2], SamplingParams(max_new_tokens=24)).result()
    assert result.stats.steps == 4  # 24 tokens, 5 accepted and one more in each step


@pytest.mark.parametrize("state", ["empty", "random", "hot"])
@pytest.mark.parametrize("options", [{}, {"shape": "static"}, {"scope": "private", "shape": "static"}], ids=str)
def test_greedy_text_is_plains_from_any_state_alone_and_in_a_batch(tiny_llama, state: str, options: dict) -> None:
    engine = Outrider(tiny_llama, "plain", strict=True)
    recipe = engine.recipe("token-recycling", {"controller": "fixed", **options})
    prompts = [[1, 5, 9, 5, 9], [7, 7, 7], [3]]
    params = SamplingParams(max_new_tokens=32)
    plain = [engine.engine.submit(p, params, engine.recipe("plain")).result().token_ids for p in prompts]
    if state == "random":
        recipe.drafter.remember(random_memory(recipe.drafter, 1))
    if state == "hot":
        [engine.engine.submit(p, params, recipe).result() for p in prompts]
    handles = [engine.engine.submit(p, params, recipe) for p in prompts]
    assert [handle.result().token_ids for handle in handles] == plain
    alone = [engine.engine.submit(p, params, recipe).result() for p in prompts]
    assert [g.token_ids for g in alone] == plain
    if options.get("scope") == "private":  # neither the batch nor an earlier request can be felt
        assert [g.stats.steps for g in alone] == [handle.result().stats.steps for handle in handles]
    elif state == "hot":
        assert sum(g.stats.steps for g in alone) < 0.8 * sum(len(tokens) for tokens in plain)


def test_what_a_private_request_teaches_ends_with_it() -> None:
    drafter = Recycling(V, successors=4, scope="private")
    before = drafter.memory()
    chunk = Chunk(0, 0, [3, 5], Scores(torch.randn(2, V)))
    drafter.begin(0, history([3, 5, 3], V))
    drafter.absorb([chunk])
    drafter.begin(1, history([3, 5, 3], V))
    one, other = drafter.propose([0, 1], [Budget(4, 2)] * 2, [None] * 2)
    assert one.candidates > 0 and other.candidates == 0
    drafter.end(0)
    drafter.begin(0, history([3, 5, 3], V))  # the same slot, perhaps the same arrays
    assert drafter.propose([0], [Budget(4, 2)], [None])[0].candidates == 0
    assert all((drafter.memory()[name] == before[name]).all() for name in before)


def test_memory_is_the_matrix_and_stays_within_its_limit() -> None:
    drafter = Recycling(V, successors=4)
    assert drafter.nbytes == V * 4 * 8
    one = V * 4 * 8
    with pytest.raises(InputError, match=f"memory_bytes is {one - 1}; the least that works here is {one}"):
        Recycling(V, successors=4, memory_bytes=one - 1)
    with pytest.raises(InputError, match=str(2 * one)):
        Recycling(V, successors=4, scope="private", memory_bytes=one)
    private = Recycling(V, successors=4, scope="private", memory_bytes=3 * one)
    for slot in range(4):
        private.begin(slot, history([1, 2], V))
        private.absorb([Chunk(slot, 0, [1], Scores(torch.randn(1, V)))])
        tree, scores = fixed(np.array([2]), np.array([-1])), Scores(torch.randn(1, V))
        private.observe([slot], [StepRecord(tree, Verdict((), 1), (1,), scores)])
        assert private.nbytes <= 3 * one
    trees = private.propose(range(4), [Budget(4, 2)] * 4, [None] * 4)
    assert [tree.candidates > 0 for tree in trees] == [True, True, False, False]  # no room: no candidates, no failure


def test_memory_goes_round_and_foreign_arrays_are_refused() -> None:
    drafter = loaded(7)
    copy = Recycling(V, successors=5)
    copy.remember(drafter.memory())
    copy.begin(0, history([1, 2, 7], V))
    trees = [d.propose([0], [Budget(20, 4)], [None])[0] for d in (drafter, copy)]
    assert spelled(trees[0]) == spelled(trees[1]) and (trees[0].weights == trees[1].weights).all()
    good = drafter.memory()
    wrong = [
        {},
        {**good, "ids": good["ids"][:-1]},
        {**good, "ids": good["ids"] + V},
        {**good, "logprobs": good["logprobs"] * np.nan},
        {**good, "logprobs": good["ids"]},
        {**good, "won": good["won"] + 1},
    ]
    for arrays in wrong:
        with pytest.raises(InputError):
            copy.remember(arrays)
    assert all(np.array_equal(copy.memory()[name], good[name]) for name in good)  # a refusal leaves what was there
    copy.forget()
    assert copy.propose([0], [Budget(20, 4)], [None])[0].candidates == 0


def test_a_token_outside_its_table_is_refused_before_compiled_code_reads_there() -> None:
    drafter, scores = Recycling(3, successors=2), Scores(torch.zeros(2, 3))
    drafter.begin(0, history([1, 2, 1], 3))
    drafter.begin(1, history([1, 2, 1], 3))
    for tokens in ([1, 3], [1, -1]):
        with pytest.raises(InputError, match="not one of the 3"):
            drafter.absorb([Chunk(1, 0, tokens, scores)])
        tree = fixed(np.array(tokens), np.array([-1, 0]))
        with pytest.raises(InputError, match="not one of the 3"):
            drafter.observe([0], [StepRecord(tree, Verdict((), 1), (1,), scores)])
    with pytest.raises(InputError, match="successors of 2 tokens"):
        tree, scores = fixed(np.array([1, 2]), np.array([-1, 0])), Scores(torch.zeros(1, 3))
        drafter.observe([0], [StepRecord(tree, Verdict((), 1), (1,), scores)])


def test_the_prompts_rows_are_asked_for_only_where_they_teach() -> None:
    assert Recycling(V).needs == Needs(logits=True, top=8) and Recycling(V).needs.of_prompt
    assert not Recycling(V, learn_prompt=False).needs.of_prompt
