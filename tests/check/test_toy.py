"""The toy runtime keeps real books: right rows for right use, assertions for wrong use."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from outrider.check.toy import ToyLM, ToySource, ToyTarget
from outrider.protocols import Needs
from outrider.tree import chain, from_paths, root

LM = ToyLM(4, seed=1)


def ready(prompt: Sequence[int] = (0, 1, 2), **options: int) -> tuple[ToyTarget, int]:
    target = ToyTarget(LM, **options)
    slot = target.acquire()
    list(target.prefill([slot], [prompt], Needs()))
    return target, slot


def test_verify_rows_are_the_laws_after_each_nodes_own_path_and_commit_keeps_the_path() -> None:
    target, slot = ready()
    tree = from_paths(2, [[1, 3], [0]])
    (scores,) = target.verify([slot], [tree], Needs())
    assert scores.logits is not None
    for node in range(len(tree)):
        expected = LM.probs([0, 1, 2, *tree.path_tokens(node)])
        assert torch.allclose(scores.logits[node].exp(), torch.tensor(expected))
    target.commit([slot], [[1, 2]])
    assert target.committed(slot) == (0, 1, 2, 1, 3) and target.length(slot) == 5


def test_a_tree_grown_level_by_level_gives_only_the_new_rows() -> None:
    target, slot = ready()
    target.verify([slot], [chain(2, [1])], Needs())
    (rest,) = target.verify([slot], [chain(2, [1, 3])], Needs(), done=[2])
    assert rest.logits is not None and len(rest.logits) == 1
    with pytest.raises(AssertionError, match="must not change"):
        target.verify([slot], [chain(2, [0, 3, 1])], Needs(), done=[2])


def test_prefill_leaves_the_last_prompt_token_pending_and_yields_what_was_asked_for() -> None:
    target = ToyTarget(LM, chunk=2)
    slots = [target.acquire(), target.acquire()]
    chunks = [c for some in target.prefill(slots, [[0, 1, 2, 3], [3]], Needs(logits=True, hidden=(-1,))) for c in some]
    assert [(c.slot, c.start, list(c.tokens)) for c in chunks] == [(0, 0, [0, 1]), (0, 2, [2])]
    assert chunks[1].scores.logits is not None
    assert torch.allclose(chunks[1].scores.logits[0].exp(), torch.tensor(LM.probs([0, 1, 2])))
    assert set(chunks[0].scores.hidden) == {-1}
    assert [target.length(s) for s in slots] == [3, 0]


def test_a_fork_shares_the_prefix_and_goes_its_own_way() -> None:
    target, slot = ready()
    other = target.fork(slot)
    target.verify([slot], [root(2)], Needs())
    target.commit([slot], [[]])
    assert (target.committed(slot), target.committed(other)) == ((0, 1, 2), (0, 1))
    target.release(other)
    assert target.free_slots == 3


def test_wrong_use_is_an_assertion() -> None:
    target, slot = ready(slots=1, max_context=4)
    with pytest.raises(AssertionError, match="no free slot"):
        target.acquire()
    with pytest.raises(AssertionError, match="commit follows verify"):
        target.commit([slot], [[]])
    with pytest.raises(AssertionError, match="end of the context"):
        target.verify([slot], [chain(2, [1, 1])], Needs())
    target.verify([slot], [from_paths(2, [[1], [3]])], Needs())
    with pytest.raises(AssertionError, match="parent to child"):
        target.commit([slot], [[1, 2]])
    with pytest.raises(AssertionError, match="between steps"):
        target.fork(slot)
    target.release(slot)
    with pytest.raises(AssertionError, match="not held"):
        target.release(slot)
    slot = target.acquire()
    next(target.prefill([slot], [[0, 1, 2]], Needs()))
    with pytest.raises(AssertionError, match="not exhausted"):
        target.verify([slot], [root(2)], Needs())


class Text:
    """A `Context` as far as a toy source looks."""

    prompt: Sequence[int] = ()
    output: Sequence[int] = ()
    temperature = 1.0

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = np.array(tokens)


def test_a_source_gives_the_law_after_each_node_in_order() -> None:
    source = ToySource(LM)
    source.begin(0, Text([0, 1]), [])  # type: ignore[arg-type]
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
