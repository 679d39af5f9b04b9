"""Medusa and Hydra at run time: distributions are those of training, after any step, in any batch, along any path."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.control.fixed import Fixed
from outrider.core.engine import Engine
from outrider.core.protocols import Recipe
from outrider.core.records import Budget, Chunk, Scores
from outrider.core.sampling import SamplingParams
from outrider.core.schedule import run_texts
from outrider.draft.feature.hydra import HydraSource
from outrider.draft.feature.medusa import MedusaSource
from outrider.draft.grown import Grown
from outrider.grow.chain import Chain
from outrider.grow.dyspec import Threshold
from outrider.grow.topk import TopK
from outrider.models import load_model
from outrider.models.networks.heads import HeadsShape, HydraHeads, MedusaHeads
from outrider.models.trained import target_head
from outrider.runtime.targets import eager_target
from outrider.train.kinds.medusa import HeadsLearner, HeadsPlan
from outrider.train.losses import LOSSES
from outrider.verify.invariant import Invariant
from outrider.verify.recursive import Recursive
from outrider.verify.rejection import Rejection
from tests.draft.toy_loop import history
from tests.watched import llama

PROMPTS = [[1, 2, 3, 4], [9, 8], [5], [7, 7, 7, 30, 2, 1]]
PLAIN = Recipe("plain", None, Invariant(), Fixed(Budget(0, 0)))
KINDS = {"medusa": (MedusaHeads, MedusaSource), "hydra": (HydraHeads, HydraSource)}


@pytest.fixture(scope="module")
def loaded():
    return load_model(llama(1).requires_grad_(False))


@pytest.fixture(scope="module", params=list(KINDS))
def source_of(request, loaded):
    """Random weights and a head over every other token; a new source each time."""
    torch.manual_seed(2)
    make, source = KINDS[request.param]
    ids = torch.arange(0, 52, 2)
    net = make(HeadsShape(32, 3, 2, 26), ids, target_head(loaded, ids)).requires_grad_(False)
    for block in net.blocks:
        torch.nn.init.normal_(block.weight, std=0.3)
    return lambda kind=source: kind(net, loaded.model.get_input_embeddings())


def run(loaded, recipe: Recipe, prompts=PROMPTS, **sampling) -> list:
    engine = Engine(eager_target(loaded.model, max_slots=4), PLAIN, strict=True)
    handles = [engine.submit(p, SamplingParams(**{"max_new_tokens": 25} | sampling), recipe) for p in prompts]
    return [handle.result() for handle in handles]


def recipe(source, grower, verifier=None, budget: int = 8) -> Recipe:
    rule = verifier or Invariant()
    return Recipe(source.name, Grown(source, grower, sampled=rule.coupled), rule, Fixed(Budget(budget, 3)))


def trained_probs(loaded, net, text: list[int], drafted: list[int]) -> np.ndarray:
    """What training computes at the column before the pending token, text[-1], for the head after `drafted`."""
    learner = HeadsLearner(loaded, net, HeadsPlan(), LOSSES["kl"])
    _, feature, embedded = learner.look(torch.tensor([[*text, *drafted]]))
    state = learner.state(len(drafted), feature, embedded)[0, len(text) - 2]
    probs = torch.zeros(53, dtype=torch.float64)
    probs[net.ids] = net.logits(state).double().softmax(-1)
    return probs.numpy()


class Seen:
    """Lets another grower grow, and keeps every distribution with the text and the path that it was asked for."""

    def __init__(self, inner) -> None:
        self.inner, self.found = inner, []

    def grow(self, source, slots, pending, budgets, noise):
        outer = self

        class Noting:
            name, needs = source.name, source.needs

            def start(self, slots):
                rows = source.start(slots)
                for slot, row in zip(slots, rows, strict=True):
                    outer.found.append((source.seats[slot].context.tokens.tolist(), [], row))
                return rows

            def extend(self, slots, trees, done):
                every = source.extend(slots, trees, done)
                for slot, tree, first, rows in zip(slots, trees, done, every, strict=True):
                    text = source.seats[slot].context.tokens.tolist()
                    outer.found += [
                        (text, tree.path_tokens(node), row)
                        for node, row in zip(range(first, len(tree)), rows, strict=True)
                    ]
                return every

        return self.inner.grow(Noting(), slots, pending, budgets, noise)

    def observe(self, slots, records) -> None: ...


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_distribution_of_a_run_is_that_of_training_for_the_same_inputs(
    loaded, source_of, temperature: float
) -> None:
    source, seen = source_of(), Seen(TopK(beam=3, branch=3, depth=3))
    results = run(loaded, recipe(source, seen), temperature=temperature, seed=4)
    assert sum(g.stats.accepted for g in results) > 0
    depths = {len(path) for _, path, row in seen.found if len(row.ids)}
    assert depths == {0, 1, 2} and len(seen.found) > 100
    silent = [text for text, _, row in seen.found if not len(row.ids)]
    assert silent == [[5]]  # a prompt of one token: the target has said nothing yet
    for text, path, row in seen.found:
        if len(row.ids):
            expected = trained_probs(loaded, source.net, text, path)
            np.testing.assert_allclose(row.probs, expected[row.ids], atol=1e-5)
            assert row.probs.sum() == pytest.approx(1)


@pytest.mark.parametrize(
    "grower", [Chain(), TopK(beam=3, branch=3, depth=3), Threshold(3)], ids=lambda g: type(g).__name__
)
def test_greedy_text_is_the_targets(loaded, source_of, grower) -> None:
    drafted = run(loaded, recipe(source_of(), grower))
    assert [g.token_ids for g in drafted] == [g.token_ids for g in run(loaded, PLAIN)]
    assert sum(g.stats.drafted for g in drafted) > 100


@pytest.mark.parametrize("rule", [Rejection(), Recursive()], ids=lambda rule: rule.name)
def test_sampled_drafts_run_under_coupled_rules(loaded, source_of, rule) -> None:
    grower = Chain() if rule.name == "rejection" else Threshold(3)
    results = run(loaded, recipe(source_of(), grower, rule), temperature=1.0, seed=2)
    assert all(g.stats.new_tokens == 25 for g in results) and sum(g.stats.accepted for g in results) > 3


def test_a_batch_drafts_what_each_sequence_would_alone(loaded, source_of) -> None:
    together, alone = Seen(TopK(depth=3)), Seen(TopK(depth=3))
    run(loaded, recipe(source_of(), together))
    source = source_of()
    for prompt in PROMPTS:
        run(loaded, recipe(source, alone), [prompt])
    pairs = ((x, sorted((t, p, row.ids[:3].tolist()) for t, p, row in x.found)) for x in (together, alone))
    (_, first), (_, second) = pairs
    assert first == second


def test_deeper_than_its_heads_it_says_nothing(loaded, source_of) -> None:
    source, seen = source_of(), Seen(Chain())
    made = recipe(source, seen)
    made = Recipe(made.name, made.drafter, made.verifier, Fixed(Budget(6, 6)))
    results = run(loaded, made, [PROMPTS[0]])
    assert max(len(path) for _, path, _ in seen.found) == 3
    assert all(not len(row.ids) for _, path, row in seen.found if len(path) == 3)
    assert results[0].token_ids == run(loaded, PLAIN, [PROMPTS[0]])[0].token_ids


def test_only_hydras_heads_look_at_the_tokens_before() -> None:
    torch.manual_seed(0)
    feature, one, other = torch.randn(8), torch.randn(2, 8), torch.randn(2, 8)
    for make, looks in ((MedusaHeads, False), (HydraHeads, True)):
        net = make(HeadsShape(8, 2, 1, 5), torch.arange(5), torch.nn.Linear(8, 5))
        same = torch.equal(net.state(1, feature, one), net.state(1, feature, other))
        assert same != looks


def test_blocks_of_zero_say_what_the_targets_head_says(loaded) -> None:
    """And so the feature that is read is the one the target's own head reads."""
    ids = torch.arange(53)
    text = torch.tensor([[4, 8, 15, 16, 23, 42]])
    for make, _ in KINDS.values():
        net = make(HeadsShape(32, 2, 2, 53), ids, target_head(loaded, ids))
        for block in net.blocks:
            torch.nn.init.zeros_(block.weight)
        learner = HeadsLearner(loaded, net, HeadsPlan(), LOSSES["kl"])
        logits, feature, embedded = learner.look(text)
        for number in range(2):
            torch.testing.assert_close(net.logits(learner.state(number, feature, embedded)), logits)


def test_behind_a_prefix_it_never_saw_the_last_row_is_enough_and_none_leaves_it_silent(loaded, source_of) -> None:
    prompts = [list(range(3, 15)), list(range(20, 26))]
    target = eager_target(loaded.model, max_slots=4)
    slots = [target.acquire() for _ in prompts]
    first = source_of()
    texts = [(slot, prompt[:-1]) for slot, prompt in zip(slots, prompts, strict=True)]
    (chunks,) = run_texts(target, texts, first.needs)
    found = []
    for kept in (100, 1):
        source = source_of()
        for slot, prompt in zip(slots, prompts, strict=True):
            source.begin(slot, history(prompt, 53))
        assert [len(row.ids) for row in source.start(slots)] == [0, 0]
        source.absorb([
            Chunk(c.slot, c.start + len(c.tokens[:-kept]), c.tokens[-kept:],
                  Scores(None, {layer: states[-kept:] for layer, states in c.scores.hidden.items()}))
            for c in chunks
        ])  # fmt: skip
        found.append(source.start(slots))
    for one, other in zip(*found, strict=True):
        assert len(one.ids) and np.array_equal(one.ids, other.ids) and np.array_equal(one.probs, other.probs)
