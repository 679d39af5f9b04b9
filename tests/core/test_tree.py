"""TokenTree: shape, mask, merging, pruning and the classification of draws, against plain oracles."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.core.errors import UnsupportedDraws
from outrider.core.tree import (
    NOTHING,
    Draw,
    Law,
    QRow,
    TokenTree,
    chain,
    fixed,
    from_paths,
    law_of,
    merge,
    root,
)


def row(**probs: float) -> QRow:
    """row(t3=0.5, t7=0.5): a distribution over tokens 3 and 7."""
    return QRow(np.array([int(name[1:]) for name in probs], dtype=np.int64), np.array(list(probs.values())))


@st.composite
def trees(draw: st.DrawFn, sampled: bool = False, pending: int = 100) -> TokenTree:
    """Random trees with distinct siblings; with `sampled`, some draws carry rows and some name no child."""
    rows = draw(st.integers(1, 40))
    parents = [-1] + [draw(st.integers(0, i - 1)) for i in range(1, rows)]
    used: dict[int, int] = {}
    tokens = [pending]
    for parent in parents[1:]:
        used[parent] = used.get(parent, -1) + draw(st.integers(1, 2))
        tokens.append(used[parent])
    draws: list[list[Draw]] = [[] for _ in range(rows)]
    for i in range(1, rows):
        q = row(**{f"t{tokens[i]}": 0.5, "t99": 0.5}) if sampled and draw(st.booleans()) else None
        draws[parents[i]].append(Draw(tokens[i], i, q))
    for i in range(rows if sampled else 0):
        if draw(st.integers(0, 3)) == 0:
            draws[i].append(Draw(99, NOTHING, row(t99=1.0)))
    return TokenTree(np.array(tokens), np.array(parents), tuple(map(tuple, draws)))


def ancestors(tree: TokenTree, node: int) -> set[int]:
    found = set()
    while node >= 0:
        found.add(node)
        node = int(tree.parents[node])
    return found


def paths_of(tree: TokenTree) -> set[tuple[int, ...]]:
    return {tuple(tree.path_tokens(i)) for i in range(len(tree))}


def drawn(tree: TokenTree) -> dict[tuple[int, ...], list[tuple[int, bool, bool]]]:
    """What was drawn at each path: token, whether it stands in the tree, whether it was sampled."""
    return {
        tuple(tree.path_tokens(i)): [(d.token, d.child != NOTHING, d.row is not None) for d in tree.draws[i]]
        for i in range(len(tree))
    }


def assert_children_match_draws(tree: TokenTree) -> None:
    for node, draws in enumerate(tree.draws):
        for d in draws:
            if d.child != NOTHING:
                assert tree.parents[d.child] == node and tree.tokens[d.child] == d.token


@given(trees())
def test_depth_path_and_mask_follow_the_parents(tree: TokenTree) -> None:
    mask = tree.ancestor_mask()
    assert mask.dtype == bool and mask.shape == (len(tree), len(tree))
    for i in range(len(tree)):
        above = ancestors(tree, i)
        assert set(np.nonzero(mask[i])[0].tolist()) == above
        assert tree.depths[i] == len(above) - 1
        assert tree.path(i) == sorted(above - {0})
        assert tree.path_tokens(i) == [tree.tokens[j] for j in sorted(above - {0})]
    assert tree.depth == max(tree.depths) and tree.candidates == len(tree) - 1


@given(trees())
def test_siblings_never_see_each_other(tree: TokenTree) -> None:
    mask = tree.ancestor_mask()
    for node in range(len(tree)):
        children = tree.children(node)
        assert not (mask[np.ix_(children, children)] & ~np.eye(len(children), dtype=bool)).any()


def test_mask_of_a_tree_wider_than_a_machine_word() -> None:
    tree = chain(0, list(range(200)))
    assert np.array_equal(tree.ancestor_mask(), np.tri(201, dtype=bool))


@given(trees(), st.integers(0, 60))
def test_child_finds_exactly_the_child_with_the_token(tree: TokenTree, token: int) -> None:
    for node in range(len(tree)):
        hits = [c for c in tree.children(node) if tree.tokens[c] == token]
        assert tree.child(node, token) == (hits[0] if hits else NOTHING)


@pytest.mark.parametrize("parents", [[-1, 1], [0, 0], [-1, -1], [-1, 2, 1], [-1, -2]])
def test_parents_that_are_no_tree_are_refused(parents: list[int]) -> None:
    with pytest.raises(AssertionError):
        TokenTree(np.arange(len(parents)), np.array(parents), ((),) * len(parents))


def test_root_has_nothing_to_verify() -> None:
    tree = root(5)
    assert tree.tokens.tolist() == [5] and tree.candidates == 0 and tree.is_chain and tree.law(0) is Law.NONE
    assert tree.ancestor_mask().tolist() == [[True]]


def test_chain_of_point_masses_and_of_rows() -> None:
    points = chain(9, [1, 2, 3], origin="lookup")
    assert points.tokens.tolist() == [9, 1, 2, 3] and points.is_chain and not points.is_sampled
    assert points.origins == ("", "lookup", "lookup", "lookup")
    assert [points.law(i) for i in range(4)] == [Law.FIXED] * 3 + [Law.NONE]
    rows = [row(t1=0.5, t4=0.5), row(t2=1.0)]
    sampled = chain(9, [1, 2], rows)
    assert sampled.is_sampled and [d.row for draws in sampled.draws for d in draws] == rows
    assert_children_match_draws(sampled)
    assert len(chain(9, [])) == 1


@given(st.lists(st.lists(st.integers(0, 3), max_size=5), max_size=8))
def test_from_paths_holds_every_prefix_once(paths: list[list[int]]) -> None:
    tree = from_paths(7, paths)
    assert len(paths_of(tree)) == len(tree)
    assert paths_of(tree) == {tuple(p[:n]) for p in paths for n in range(len(p) + 1)} | {()}
    assert_children_match_draws(tree)
    assert all(tree.law(i) in (Law.FIXED, Law.NONE) for i in range(len(tree)))


@given(trees(sampled=True), trees(sampled=True))
def test_merge_is_the_union_with_draws_concatenated_sampled_first(first: TokenTree, second: TokenTree) -> None:
    both = merge(first, second)
    assert paths_of(both) == paths_of(first) | paths_of(second) and len(paths_of(both)) == len(both)
    assert_children_match_draws(both)
    ours, theirs = drawn(first), drawn(second)
    for path, draws in drawn(both).items():
        together = ours.get(path, []) + theirs.get(path, [])
        assert draws == [d for d in together if d[2]] + [d for d in together if not d[2]]


def test_merge_keeps_origins_of_the_first_tree_at_shared_nodes() -> None:
    both = merge(from_paths(0, [[1, 2]], "a"), from_paths(0, [[1, 3]], "b"))
    assert both.tokens.tolist() == [0, 1, 2, 3] and both.origins == ("", "a", "a", "b")
    assert merge(from_paths(0, [[1]]), from_paths(0, [[2]], "b")).origins == ("", "", "b")
    assert [d.child for d in both.draws[0]] == [1, 1]  # two draws name one child


def test_merge_refuses_trees_on_different_pending_tokens() -> None:
    with pytest.raises(AssertionError):
        merge(root(1), root(2))


@given(trees(), st.data())
def test_keep_holds_the_asked_nodes_and_their_ancestors(tree: TokenTree, data: st.DataObject) -> None:
    asked = data.draw(st.sets(st.integers(0, len(tree) - 1)))
    kept = tree.keep(asked)
    wanted = {0}.union(*(ancestors(tree, i) for i in asked))
    assert paths_of(kept) == {tuple(tree.path_tokens(i)) for i in wanted} and len(kept) == len(wanted)
    assert_children_match_draws(kept)
    before = drawn(tree)
    for path, draws in drawn(kept).items():
        assert draws == [d for d in before[path] if (*path, d[0]) in paths_of(kept)]


@given(trees(sampled=True), st.data())
def test_keep_refuses_exactly_the_cuts_of_sampled_draws(tree: TokenTree, data: st.DataObject) -> None:
    asked = data.draw(st.sets(st.integers(0, len(tree) - 1)))
    wanted = {0}.union(*(ancestors(tree, i) for i in asked))
    cuts = any(
        d.row is not None and (node not in wanted or (d.child != NOTHING and d.child not in wanted))
        for node, draws in enumerate(tree.draws)
        for d in draws
    )
    if cuts:
        with pytest.raises(UnsupportedDraws):
            tree.keep(asked)
    else:
        assert len(tree.keep(asked)) == len(wanted)


def test_keep_refuses_to_cut_a_sampled_draw_below_a_point_mass() -> None:
    # dropping node 1 because of what was sampled below it would change the distribution of the second token
    drawn_from = row(t2=1.0)
    tree = TokenTree(
        np.array([0, 1, 2]), np.array([-1, 0, 1]), ((Draw(1, 1, None),), (Draw(2, 2, drawn_from),), ()), ("", "a", "b")
    )
    with pytest.raises(UnsupportedDraws):
        tree.keep([0])
    assert tree.keep([2]).origins == ("", "a", "b")


@given(trees(sampled=True), st.data())
def test_mute_takes_nodes_out_of_the_pass_and_leaves_every_draw(tree: TokenTree, data: st.DataObject) -> None:
    asked = data.draw(st.sets(st.integers(1, len(tree) - 1))) if len(tree) > 1 else set()
    muted = tree.mute(asked)
    standing = [i for i in range(len(tree)) if not ancestors(tree, i) & asked]
    assert paths_of(muted) == {tuple(tree.path_tokens(i)) for i in standing} and len(muted) == len(standing)
    assert_children_match_draws(muted)
    before = drawn(tree)
    for path, draws in drawn(muted).items():
        assert [(token, sampled) for token, _, sampled in draws] == [(t, sampled) for t, _, sampled in before[path]]
        for (token, stands, _), (_, stood, _) in zip(draws, before[path], strict=True):
            assert stands == (stood and (*path, token) in paths_of(muted))


def test_mute_never_takes_the_pending_token() -> None:
    with pytest.raises(AssertionError):
        chain(0, [1]).mute([0])


FULL = row(t1=0.5, t2=0.3, t3=0.2)
SHORT = row(t1=0.4, t2=0.2)  # 0.4 left to "no proposal"
CASES = {
    "leaf": ([], Law.NONE),
    "point masses": ([Draw(1, 1, None), Draw(2, 2, None)], Law.FIXED),
    "one sampled": ([Draw(1, 1, FULL)], Law.IID),
    "the same row twice": ([Draw(1, 1, FULL), Draw(1, 1, FULL)], Law.IID),
    "an equal row": ([Draw(1, 1, FULL), Draw(2, 2, row(t1=0.5, t2=0.3, t3=0.2))], Law.IID),
    "no proposal drawn": ([Draw(NOTHING, NOTHING, SHORT), Draw(1, 1, SHORT)], Law.IID),
    "reduced row": ([Draw(1, 1, FULL), Draw(2, 2, FULL.without(1))], Law.WITHOUT_REPLACEMENT),
    "reduced twice": (
        [Draw(2, 1, FULL), Draw(1, 2, FULL.without(2)), Draw(3, 3, FULL.without(2).without(1))],
        Law.WITHOUT_REPLACEMENT,
    ),
    "reduced by the wrong token": ([Draw(1, 1, FULL), Draw(3, 2, FULL.without(2))], Law.MIXED),
    "removed but not scaled up": ([Draw(1, 1, FULL), Draw(2, 2, row(t2=0.3, t3=0.2))], Law.MIXED),
    "two rows": ([Draw(1, 1, FULL), Draw(1, 1, SHORT)], Law.MIXED),
    "sampled then point": ([Draw(1, 1, FULL), Draw(2, 2, None)], Law.MIXED),
    "points then one that excludes them": ([Draw(8, 1, None), Draw(9, 2, None), Draw(1, 3, FULL)], Law.TOP_PLUS_ONE),
    "points then one that includes them": ([Draw(2, 1, None), Draw(1, 2, FULL)], Law.OTHER),
    "point between sampled": ([Draw(1, 1, FULL), Draw(8, 2, None), Draw(2, 3, FULL)], Law.OTHER),
    "points then two sampled": ([Draw(8, 1, None), Draw(1, 2, FULL), Draw(2, 3, FULL)], Law.OTHER),
}


@pytest.mark.parametrize("case", CASES)
def test_law_is_read_from_the_draws(case: str) -> None:
    draws, law = CASES[case]
    assert law_of(draws) is law


def test_without_removes_a_token_and_keeps_the_total() -> None:
    rest = SHORT.without(1)
    assert rest.ids.tolist() == [2] and rest.probs.sum() == pytest.approx(0.6)
    assert len(rest.without(2).ids) == 0
    assert FULL.prob(3) == 0.2 and FULL.prob(4) == 0.0


@given(trees())
def test_fixed_draws_each_child_once_in_storage_order(tree: TokenTree) -> None:
    made = fixed(tree.tokens, tree.parents, origin="x")
    assert_children_match_draws(made)
    for node in range(len(made)):
        assert [d.child for d in made.draws[node]] == tree.children(node)
    assert made.origins == ("",) + ("x",) * made.candidates


def test_draws_of_point_masses_are_made_when_asked_for_and_are_a_sequence_like_any() -> None:
    tree = fixed(np.array([9, 4, 5, 6]), np.array([-1, 0, 0, 1]))
    assert len(tree.draws) == 4 and tree.path_tokens(3) == [4, 6] and tree.draws._made is None
    want = ((Draw(4, 1, None), Draw(5, 2, None)), (Draw(6, 3, None),), (), ())
    assert (
        tuple(tree.draws) == want and tree.draws[1] == want[1] and tree.draws[-1] == () and tree.draws[:2] == want[:2]
    )
