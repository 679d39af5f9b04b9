"""The rules that work on sparse rows and tensors say what plain scalar arithmetic says, on the same noise."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.check import scalar
from outrider.check.drawings import DRAWINGS, draw_tree
from outrider.check.toy import TableRows, ToyLM
from outrider.core.noise import DRAFT, VERIFY, StreamNoise
from outrider.core.protocols import Noise, Verifier
from outrider.core.records import Verdict
from outrider.core.tree import Law, TokenTree
from outrider.verify.block import Block
from outrider.verify.kseq import KSeq
from outrider.verify.optimal import Optimal
from outrider.verify.recursive import Recursive
from outrider.verify.rejection import Rejection
from outrider.verify.traversal import Traversal

Reference = Callable[[TokenTree, scalar.ProbsAt, Noise], Verdict]
TWINS: list[tuple[Verifier, Reference]] = [
    (Rejection(), scalar.recursive),
    (Recursive(), scalar.recursive),
    (Optimal(), scalar.recursive),
    (KSeq(), scalar.k_seq),
    (Block(), scalar.traversal),
    (Traversal(), scalar.traversal),
]
CHAINS = {"rejection", "block"}


@pytest.mark.parametrize(("rule", "reference"), TWINS, ids=lambda twin: getattr(twin, "name", ""))
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_rule_equals_its_scalar_reference(rule: Verifier, reference: Reference, data: st.DataObject) -> None:
    laws = (rule.honours & {Law.FIXED, Law.TOP_PLUS_ONE}) if rule.name == "optimal" else rule.honours
    drawing = data.draw(st.sampled_from([d for d in DRAWINGS if d.law in laws]))
    shape = data.draw(st.sampled_from([(1,), (1, 1, 1)] if rule.name in CHAINS else [(3,), (2, 2), (3, 1, 2)]))
    seed = data.draw(st.integers(0, 2**32))
    vocab, zeros = data.draw(st.integers(2, 6)), data.draw(st.sampled_from([0.0, 0.4]))
    target, draft, second = (ToyLM(vocab, seed + i, zeros=zeros, concentration=0.7) for i in range(3))
    tree = draw_tree(drawing, shape, draft, second, [0], StreamNoise(seed, 0, DRAFT, 0, 1))
    noise = StreamNoise(seed, 0, VERIFY, 0, 1)
    said = rule.verify(tree, TableRows(target, [0], tree), noise)
    assert said == reference(tree, lambda node: target.probs([0, *tree.path_tokens(node)]).tolist(), noise)


@given(seed=st.integers(0, 2**32), length=st.integers(1, 5))
@settings(max_examples=150, deadline=None)
def test_block_verification_is_traversal_of_a_chain(seed: int, length: int) -> None:
    target, draft = ToyLM(4, seed), ToyLM(4, seed + 1)
    iid = next(d for d in DRAWINGS if d.name == "iid, some propose nothing")
    tree = draw_tree(iid, (1,) * length, draft, draft, [0], StreamNoise(seed, 0, DRAFT, 0, 1))
    noise, rows = StreamNoise(seed, 0, VERIFY, 0, 1), TableRows(target, [0], tree)
    assert Block().verify(tree, rows, noise) == Traversal().verify(tree, rows, noise)
