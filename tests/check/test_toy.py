"""The toy runtime keeps real books: right rows for right use, assertions for wrong use."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from outrider.check.toy import ToyLM, ToySource, ToyTarget
from outrider.core.records import NO_NEEDS, Needs, Piece
from outrider.core.schedule import run_all, run_texts
from outrider.core.tree import chain, from_paths, root

LM = ToyLM(4, seed=1)


def ready(prompt: Sequence[int] = (0, 1, 2), **options: int) -> tuple[ToyTarget, int]:
    target = ToyTarget(LM, **options)
    slot = target.acquire()
    run_all(target, [(slot, prompt[:-1])])
    return target, slot


def test_verify_rows_are_the_distributions_after_each_nodes_own_path_and_commit_keeps_the_path() -> None:
    target, slot = ready()
    tree = from_paths(2, [[1, 3], [0]])
    (scores,) = target.run([Piece(slot, tree=tree)], NO_NEEDS)
    assert scores.logits is not None
    for node in range(len(tree)):
        expected = LM.probs([0, 1, 2, *tree.path_tokens(node)])
        assert torch.allclose(scores.logits[node].exp(), torch.tensor(expected))
    target.commit([slot], [[1, 2]])
    assert target.committed(slot) == (0, 1, 2, 1, 3) and target.length(slot) == 5


def test_a_tree_grown_level_by_level_gives_only_the_new_rows() -> None:
    target, slot = ready()
    target.run([Piece(slot, tree=chain(2, [1]))], NO_NEEDS)
    (rest,) = target.run([Piece(slot, tree=chain(2, [1, 3]), done=2)], NO_NEEDS)
    assert rest.logits is not None and len(rest.logits) == 1
    with pytest.raises(AssertionError, match="must not change"):
        target.run([Piece(slot, tree=chain(2, [0, 3, 1]), done=2)], NO_NEEDS)


def test_text_runs_in_pieces_behind_what_is_held_and_yields_what_was_asked_for() -> None:
    target = ToyTarget(LM, prompt_rows=2)
    slots = [target.acquire(), target.acquire()]
    needs = Needs(logits=True, hidden=(-1,))
    chunks = [c for some in run_texts(target, [(slots[0], [0, 1, 2]), (slots[1], [])], needs) for c in some]
    assert [(c.slot, c.start, list(c.tokens)) for c in chunks] == [(0, 0, [0, 1]), (0, 2, [2])]
    assert chunks[1].scores.logits is not None
    assert torch.allclose(chunks[1].scores.logits[0].exp(), torch.tensor(LM.probs([0, 1, 2])))
    assert set(chunks[0].scores.hidden) == {-1}
    assert [target.length(s) for s in slots] == [3, 0]


def test_a_fork_shares_the_prefix_and_goes_its_own_way() -> None:
    target, slot = ready()
    other = target.fork(slot)
    target.run([Piece(slot, tree=root(2))], NO_NEEDS)
    target.commit([slot], [[]])
    assert (target.committed(slot), target.committed(other)) == ((0, 1, 2), (0, 1))
    target.truncate(slot, 1)
    assert target.committed(slot) == (0,)
    shorter = target.fork(other, 1)
    assert target.committed(shorter) == (0,)
    target.release(other)
    assert target.free_slots == 2


def test_wrong_use_is_an_assertion() -> None:
    target, slot = ready(slots=1, max_context=4)
    with pytest.raises(AssertionError, match="no free slot"):
        target.acquire()
    with pytest.raises(AssertionError, match="commit follows a pass"):
        target.commit([slot], [[]])
    with pytest.raises(AssertionError, match="end of the context"):
        target.run([Piece(slot, tree=chain(2, [1, 1]))], NO_NEEDS)
    target.run([Piece(slot, tree=from_paths(2, [[1], [3]]))], NO_NEEDS)
    with pytest.raises(AssertionError, match="parent to child"):
        target.commit([slot], [[1, 2]])
    with pytest.raises(AssertionError, match="between steps"):
        target.fork(slot)
    with pytest.raises(AssertionError, match="between steps"):
        target.run([Piece(slot, [1])], NO_NEEDS)
    with pytest.raises(AssertionError, match="one piece a slot"):
        target.run([Piece(slot, [1]), Piece(slot, [2])], NO_NEEDS)
    with pytest.raises(AssertionError, match="text or a tree"):
        target.run([Piece(slot, [1], root(2))], NO_NEEDS)
    target.release(slot)
    with pytest.raises(AssertionError, match="not held"):
        target.release(slot)
    slot = target.acquire()
    with pytest.raises(AssertionError, match="more rows of text"):
        target.run([Piece(slot, [0] * (target.prompt_rows + 1))], NO_NEEDS)
    target.run([Piece(slot, [0, 1, 2])], NO_NEEDS)
    with pytest.raises(AssertionError, match="fit the context"):
        target.run([Piece(slot, [0])], NO_NEEDS)


class Text:
    """A `Context` as far as a toy source looks."""

    prompt: Sequence[int] = ()
    output: Sequence[int] = ()
    temperature = 1.0

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = np.array(tokens)


def test_a_source_gives_the_distribution_after_each_node_in_order() -> None:
    source = ToySource(LM)
    source.begin(0, Text([0, 1]))  # type: ignore[arg-type]
    (first,) = source.start([0])
    assert np.allclose(first.probs, LM.probs([0, 1]))
    tree = from_paths(1, [[2, 3], [0]])
    with pytest.raises(AssertionError, match="earlier nodes"):
        source.extend([0], [tree], [2])
    (rows,) = source.extend([0], [tree], [1])
    assert np.allclose([r.probs for r in rows], [LM.probs([0, 1, *tree.path_tokens(i)]) for i in (1, 2, 3)])
    source.end(0)


@pytest.mark.parametrize(
    ("options", "support"), [({"top_k": 2}, 2), ({"greedy": True}, 1), ({"allowed": (1, 3)}, 2), ({"top_p": 1e-9}, 1)]
)
def test_truncated_toys_keep_their_likeliest_tokens(options: dict[str, object], support: int) -> None:
    cut = ToyLM(4, seed=1, **options)  # type: ignore[arg-type]
    for context in ([0], [1, 2], [3, 3, 3]):
        p, full = cut.probs(context), LM.probs(context)
        assert p.sum() == pytest.approx(1) and np.count_nonzero(p) == support
        if "allowed" not in options:
            assert full[p > 0].min() > full[p == 0].max()
