"""DFlash at run time: what it drafts is what training computes for the same text, in any batch, after any step."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from outrider.control.fixed import Fixed
from outrider.core.engine import Engine
from outrider.core.protocols import Recipe
from outrider.core.records import Budget, Chunk, Scores
from outrider.core.sampling import SamplingParams
from outrider.core.schedule import run_texts
from outrider.draft.block.dflash import DFlashSource
from outrider.draft.grown import Grown
from outrider.grow.block.best_first import BestFirst
from outrider.grow.chain import Chain
from outrider.grow.dyspec import Threshold
from outrider.models import load_model
from outrider.models.networks.block import BlockShape, DFlashNet
from outrider.models.trained import target_head
from outrider.runtime.cuda import reference
from outrider.runtime.layers.blocks import FeatureBlocks
from outrider.runtime.layers.recorded_blocks import RecordedBlocks
from outrider.runtime.targets import eager_target
from outrider.train.block_mask import Anchors
from outrider.train.kinds.dflash import DFlashLearner, DFlashPlan
from outrider.train.losses import LOSSES
from outrider.train.text.selfdata import SelfData
from outrider.verify.invariant import Invariant
from outrider.verify.recursive import Recursive
from outrider.verify.rejection import Rejection
from tests.draft.toy_loop import history
from tests.watched import llama

PROMPTS = [[1, 2, 3, 4], [9, 8], [5], [7, 7, 7, 30, 2, 1]]
PLAIN = Recipe("plain", None, Invariant(), Fixed(Budget(0, 0)))
BLOCK = 5


@pytest.fixture(scope="module")
def loaded():
    return load_model(llama(1).requires_grad_(False))


@pytest.fixture(scope="module")
def net(loaded) -> DFlashNet:
    """Random weights and a head over every other token."""
    torch.manual_seed(2)
    ids = torch.arange(0, 52, 2)
    shape = BlockShape(32, 4, 2, 8, 48, (0, 1, 2), 2, BLOCK, 51, len(ids))
    made = DFlashNet(shape, ids, target_head(loaded, ids)).requires_grad_(False)
    for weight in made.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    return made


class Watched(DFlashSource):
    """Keeps the text before each proposal, and what was proposed."""

    def __init__(self, *given, **options) -> None:
        super().__init__(*given, **options)
        self.found = []

    def marginals(self, slots):
        made = super().marginals(slots)
        for slot, rows in zip(slots, made, strict=True):
            seat = self.seat(slot)
            self.found.append((seat.context.tokens.tolist(), seat.missed, rows))
        return made


def store_rows(key, value, keys, values, slots, places, rotary) -> None:
    """The reference, of what kernels can read: they go by address."""
    assert all(x.is_contiguous() for x in (slots, places, *rotary)) and key.stride(-1) == value.stride(-1) == 1
    reference.store_rows(key, value, keys, values, slots, places, rotary)


def tree_attention(query, keys, values, layout, scaling, *, rotary):
    parts = (layout.slots, layout.lengths, layout.nodes, layout.begins, layout.counts, layout.causal, layout.words)
    assert all(x.is_contiguous() for x in (*parts, layout.positions, *rotary)) and query.stride(-1) == 1
    return reference.tree_attention(query, keys, values, layout, scaling, rotary=rotary)


KERNELS = SimpleNamespace(
    Layout=reference.Layout, store_rows=store_rows, tree_attention=tree_attention, top=reference.top
)


def source_of(net, loaded, recorded: bool = False) -> Watched:
    """`recorded`: with the kernels' reference, anew each time."""
    plain = FeatureBlocks(net, loaded.model.get_input_embeddings())
    return Watched(RecordedBlocks(plain, KERNELS, active=nullcontext, record=None) if recorded else plain)


def run(loaded, recipe: Recipe, prompts=PROMPTS, **sampling) -> list:
    engine = Engine(eager_target(loaded.model, max_slots=4), PLAIN, strict=True)
    handles = [engine.submit(p, SamplingParams(**{"max_new_tokens": 20} | sampling), recipe) for p in prompts]
    return [handle.result() for handle in handles]


def recipe(source, grower, verifier=None, budget: int = 8) -> Recipe:
    rule = verifier or Invariant()
    return Recipe(source.name, Grown(source, grower, sampled=rule.coupled), rule, Fixed(Budget(budget, 4)))


def trained_probs(loaded, net, text: list[int]) -> np.ndarray:
    """[depths, 53] of a block that training packs at the last token of the text."""
    learner = DFlashLearner(loaded, net, DFlashPlan(), LOSSES["kl"])
    part = SelfData(torch.tensor([text]), torch.full((1, len(text)), 2))
    anchors = Anchors(torch.tensor([[len(text) - 1]]), torch.tensor([[True]]))
    _, states = learner.look(part, anchors, learner.masked(part, anchors), None)
    probs = torch.zeros(BLOCK - 1, 53, dtype=torch.float64)
    probs[:, net.ids] = net.logits(states[0, 0, 1:]).double().softmax(-1)
    return probs.numpy()


@pytest.mark.parametrize(("temperature", "recorded"), [(0.0, False), (1.0, False), (0.0, True), (1.0, True)])
def test_every_distribution_of_a_run_is_that_of_training_for_the_same_text(
    loaded, net, temperature: float, recorded: bool
) -> None:
    source = source_of(net, loaded, recorded)
    results = run(loaded, recipe(source, BestFirst()), temperature=temperature, seed=4)
    assert sum(g.stats.accepted for g in results) > 0
    spoken = [(text, missed, rows) for text, missed, rows in source.found if rows]
    assert len(spoken) > 30 and [text for text, _, rows in source.found if not rows] == [[5]]
    for text, missed, rows in spoken:
        assert missed == 0 and len(rows) == BLOCK - 1
        for row, expected in zip(rows, trained_probs(loaded, net, text), strict=True):
            np.testing.assert_allclose(row.probs, expected[row.ids], atol=1e-5)
            assert row.probs.sum() == pytest.approx(1)
    assert not recorded or (source.driver._made and not source.driver._broken)


def test_a_step_of_the_whole_batch_asks_the_drafter_once(loaded, net) -> None:
    source = source_of(net, loaded)
    run(loaded, recipe(source, Chain()), [PROMPTS[0]])
    texts = [text for text, _, _ in source.found]
    assert len({tuple(text) for text in texts}) == len(texts) > 5  # no text was asked for twice


@pytest.mark.parametrize("grower", [Chain(), BestFirst(), Threshold(4)], ids=lambda g: type(g).__name__)
def test_greedy_text_is_the_targets(loaded, net, grower) -> None:
    drafted = run(loaded, recipe(source_of(net, loaded), grower))
    assert [g.token_ids for g in drafted] == [g.token_ids for g in run(loaded, PLAIN)]
    assert sum(g.stats.drafted for g in drafted) > 100


@pytest.mark.parametrize("rule", [Rejection(), Recursive()], ids=lambda rule: rule.name)
def test_sampled_drafts_run_under_coupled_rules(loaded, net, rule) -> None:
    grower = Chain() if rule.name == "rejection" else Threshold(4)
    results = run(loaded, recipe(source_of(net, loaded), grower, rule), temperature=1.0, seed=2)
    assert all(g.stats.new_tokens == 20 for g in results) and sum(g.stats.accepted for g in results) > 3


def test_a_batch_drafts_what_each_sequence_would_alone(loaded, net) -> None:
    together, alone = source_of(net, loaded), source_of(net, loaded)
    run(loaded, recipe(together, BestFirst()))
    for prompt in PROMPTS:
        run(loaded, recipe(alone, BestFirst()), [prompt])
    first, second = (
        sorted((text, [row.ids[:3].tolist() for row in rows]) for text, _, rows in source.found)
        for source in (together, alone)
    )
    assert first == second


def chunks_of(loaded, prompt: list[int], source, kept: int) -> list[Chunk]:
    """What ran of a prompt, of which only the last rows are handed over."""
    target = eager_target(loaded.model, max_slots=1)
    (chunks,) = run_texts(target, [(target.acquire(), prompt[:-1])], source.needs)
    return [
        Chunk(c.slot, c.start + len(c.tokens[:-kept]), c.tokens[-kept:],
              Scores(None, {layer: states[-kept:] for layer, states in c.scores.hidden.items()}))
        for c in chunks
    ]  # fmt: skip


def test_behind_a_prefix_it_never_saw_it_drafts_at_the_texts_places(loaded, net) -> None:
    """What it holds of the text is all that it sees, at the positions that this has."""
    prompt = list(range(3, 15))
    source = source_of(net, loaded)
    source.begin(0, history(prompt, 53))
    assert source.marginals([0]) == [[]]
    source.absorb(chunks_of(loaded, prompt, source, 4))
    (rows,) = source.marginals([0])
    learner = DFlashLearner(loaded, net, DFlashPlan(), LOSSES["kl"])
    part = SelfData(torch.tensor([prompt]), torch.full((1, 12), 2))
    whole = trained_probs(loaded, net, prompt)
    assert abs(whole[0][rows[0].ids] - rows[0].probs).max() > 1e-4
    with pytest.MonkeyPatch.context() as patch:  # the same mask, less the text that it never saw
        from outrider.train.kinds import dflash

        mask = dflash.block_mask

        def shorter(*given, **options):
            sees = mask(*given, **options)
            sees[:, :, : 11 - 4] = False
            return sees

        patch.setattr(dflash, "block_mask", shorter)
        anchors = Anchors(torch.tensor([[11]]), torch.tensor([[True]]))
        _, states = learner.look(part, anchors, learner.masked(part, anchors), None)
    expected = net.logits(states[0, 0, 1:]).double().softmax(-1)
    for row, probs in zip(rows, expected, strict=True):
        places = [net.ids.tolist().index(token) for token in row.ids]
        np.testing.assert_allclose(row.probs, probs[places], atol=1e-5)


def test_a_block_sees_itself_the_pending_token_and_the_text_before(loaded, net) -> None:
    learner = DFlashLearner(loaded, net, DFlashPlan(), LOSSES["kl"])

    def states(tokens: list[int], masks: list[int] | None = None):
        part = SelfData(torch.tensor([tokens]), torch.full((1, len(tokens)), 2))
        anchors = Anchors(torch.tensor([[3]]), torch.tensor([[True]]))
        given = learner.masked(part, anchors)
        given[0, 0, 1:] = torch.tensor(masks) if masks else given[0, 0, 1:]
        return learner.look(part, anchors, given, None)[1][0, 0]

    base = states([4, 8, 15, 16, 23, 42])
    assert torch.equal(base, states([4, 8, 15, 16, 9, 9]))  # not what comes after the pending token
    assert (states([4, 8, 15, 17, 23, 42]) != base).any(-1).all()  # the pending token
    assert (states([4, 9, 15, 16, 23, 42]) != base).any(-1).all()  # the text before it
    assert (states([4, 8, 15, 16, 23, 42], [51, 51, 50, 51]) != base).any(-1).all()  # each row sees the others
