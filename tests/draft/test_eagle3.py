"""One-layer drafters at run time: laws are those of training, caches follow the text, batches and trees change nothing.

EAGLE-3, EAGLE-2 and FSPAD go through the same tests, since they share source and cache.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.control.fixed import Fixed
from outrider.draft.eagle2 import Eagle2Layer
from outrider.draft.eagle3 import AT_ONCE, Eagle3Source
from outrider.draft.eagle3_layer import Eagle3Layer, Eagle3Shape
from outrider.draft.fspad import FspadLayer, FspadShape
from outrider.draft.grown import Grown
from outrider.engine import Engine
from outrider.grow.chain import Chain
from outrider.grow.dyspec import Threshold
from outrider.grow.topk import TopK
from outrider.models import load_model
from outrider.protocols import Budget, Recipe
from outrider.recipes.trained import target_head
from outrider.sampling import SamplingParams
from outrider.target.eager import TransformersTarget
from outrider.train.eagle3 import look, unrolled
from outrider.tree import NOTHING, from_paths
from outrider.verify.invariant import Invariant
from outrider.verify.recursive import Recursive
from outrider.verify.rejection import Rejection

PROMPTS = [[1, 2, 3, 4], [9, 8], [5], [7, 7, 7, 30, 2, 1]]
PLAIN = Recipe("plain", None, Invariant(), Fixed(Budget(0, 0)))


@pytest.fixture(scope="module")
def loaded():
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=53, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.3,
    )  # fmt: skip
    return load_model(LlamaForCausalLM(config).requires_grad_(False))


@pytest.fixture(scope="module", params=["eagle3", "eagle2", "fspad"])
def net(request, loaded):
    """Random weights and a head over every other token: exactness asks for no training."""
    torch.manual_seed(2)
    ids = torch.arange(0, 52, 2)
    sizes = (32, 4, 2, 8, 48)
    if request.param == "eagle3":
        layer = Eagle3Layer(Eagle3Shape(*sizes, (0, 1, 2), 26), ids)
    elif request.param == "eagle2":
        layer = Eagle2Layer(Eagle3Shape(*sizes, (3,), 26), ids, target_head(loaded, ids))
    else:
        layer = FspadLayer(FspadShape(*sizes, (3,), 26, lift=20, adapter=8), ids, target_head(loaded, ids))
    for weight in layer.parameters():
        if weight.ndim == 2:
            torch.nn.init.normal_(weight, std=0.3 if request.param == "eagle3" else 0.15)
    return layer.requires_grad_(False)


class Watched(Eagle3Source):
    """After every step: what is cached and what waits equals a fresh source over the same text."""

    def __init__(self, net, loaded) -> None:
        super().__init__(net, loaded.model.get_input_embeddings())
        self.loaded, self.lengths, self.steps = loaded, set(), 0

    @torch.inference_mode()
    def observe(self, slot, record) -> None:
        super().observe(slot, record)
        if len(record.emitted) != record.gain:
            return
        self.lengths.add((len(record.verdict.path), record.tree.depth))
        self.steps += 1
        text = self._seats[slot].context.tokens.tolist()
        mine = self._laws([slot], [self._forward([self._text(slot, self._seats[slot])])[0][-1:]])[0][0]
        fresh = law_after(self.net, self.loaded, text)
        assert np.array_equal(mine.ids, fresh.ids)
        np.testing.assert_allclose(mine.probs, fresh.probs, atol=1e-5)


def law_after(net, loaded, text: list[int]):
    """The first step of the training unroll, as a law over the target's ids, likeliest first."""
    from outrider.tree import QRow

    _, embedded, state = look(loaded, net, torch.tensor([text]))
    row = net.logits(next(iter(unrolled(net, embedded, state, 1)))[0, len(text) - 2]).softmax(-1)
    order = torch.sort(row, descending=True, stable=True).indices
    return QRow(net.ids[order].numpy(), row[order].double().numpy())


def run(loaded, recipe: Recipe, prompts=PROMPTS, chunk: int = 512, **sampling) -> list:
    engine = Engine(TransformersTarget(loaded.model, max_slots=4, prefill_chunk=chunk), PLAIN, strict=True)
    handles = [engine.submit(p, SamplingParams(**{"max_new_tokens": 25} | sampling), recipe) for p in prompts]
    return [handle.result() for handle in handles]


def recipe(source: Eagle3Source, grower, verifier=None, budget: int = 8, depth: int = 4) -> Recipe:
    rule = verifier or Invariant()
    return Recipe("eagle3", Grown(source, grower, sampled=rule.coupled), rule, Fixed(Budget(budget, depth)))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_cache_and_laws_equal_a_fresh_recomputation_after_every_step(loaded, net, temperature: float) -> None:
    source = Watched(net, loaded)
    run(loaded, recipe(source, TopK(depth=4), budget=12), temperature=temperature, seed=4)
    accepted = {path for path, _ in source.lengths}
    assert source.steps > 40 and 0 in accepted and len(accepted) > 1  # none, and some of the tree


def test_a_prompt_that_comes_in_pieces_leaves_the_same_cache(loaded, net) -> None:
    source = Watched(net, loaded)
    prompts = [list(range(3, 3 + length)) for length in (7, 21, 40)]
    run(loaded, recipe(source, TopK(depth=3)), prompts, chunk=5, max_new_tokens=8)
    assert source.steps > 8


def test_full_acceptance_keeps_the_cache_right_too(loaded, net) -> None:
    """A drafter that is always right for a while: the plain text is forced through the tree."""
    plain = run(loaded, PLAIN, [PROMPTS[0]])[0].token_ids

    class Told:
        def grow(self, source, slots, pending, budgets, noise):
            at = len(source._seats[slots[0]].context.tokens) - len(PROMPTS[0])
            source.start(slots)
            tree = from_paths(pending[0], [plain[at : at + 3]])
            source.extend(slots, [tree.keep([1])], [1])
            return [tree]

        def observe(self, slot, record) -> None: ...

    source = Watched(net, loaded)
    result = run(loaded, recipe(source, Told()), [PROMPTS[0]])[0]
    assert result.token_ids == plain and (3, 3) in source.lengths


@pytest.mark.parametrize(
    "grower", [Chain(), TopK(beam=3, branch=3, depth=4), Threshold(4)], ids=lambda g: type(g).__name__
)
def test_greedy_text_is_the_targets(loaded, net, grower) -> None:
    source = Eagle3Source(net, loaded.model.get_input_embeddings())
    drafted = run(loaded, recipe(source, grower))
    assert [g.token_ids for g in drafted] == [g.token_ids for g in run(loaded, PLAIN)]
    assert sum(g.stats.drafted for g in drafted) > 100


def test_invariant_sampling_gives_the_targets_text(loaded, net) -> None:
    source = Eagle3Source(net, loaded.model.get_input_embeddings())
    settings = {"temperature": 0.9, "seed": 7}
    drafted = run(loaded, recipe(source, TopK(depth=4)), **settings)
    assert [g.token_ids for g in drafted] == [g.token_ids for g in run(loaded, PLAIN, **settings)]


@pytest.mark.parametrize("rule", [Rejection(), Recursive()], ids=lambda rule: rule.name)
def test_sampled_drafts_run_under_coupled_rules(loaded, net, rule) -> None:
    grower = Chain() if rule.name == "rejection" else Threshold(3)
    source = Eagle3Source(net, loaded.model.get_input_embeddings())
    results = run(loaded, recipe(source, grower, rule), temperature=1.0, seed=2)
    assert all(g.stats.new_tokens == 25 for g in results) and sum(g.stats.accepted for g in results) > 5


def test_a_batch_drafts_what_each_sequence_would_alone(loaded, net) -> None:
    trees: dict[str, list] = {"together": [], "alone": []}

    class Kept(Grown):
        def propose(self, slots, budgets, noise):
            made = super().propose(slots, budgets, noise)
            for slot, tree in zip(slots, made, strict=True):
                trees[kind].append((tuple(self._contexts[slot].tokens.tolist()), tree.tokens.tolist()))
            return made

    def kept() -> Recipe:
        source = Eagle3Source(net, loaded.model.get_input_embeddings())
        return Recipe("eagle3", Kept(source, TopK(depth=3)), Invariant(), Fixed(Budget(6, 3)))

    kind = "together"
    run(loaded, kept())
    kind = "alone"
    for prompt in PROMPTS:
        run(loaded, kept(), [prompt])
    assert sorted(trees["together"]) == sorted(trees["alone"])


def test_unrolling_along_a_tree_gives_the_states_of_the_training_unroll(loaded, net) -> None:
    """Every path of a branching tree, against the diagonal of the training-time test over the same tokens."""
    prompt, tree = [3, 1, 4, 1, 5], from_paths(9, [[2, 6, 5], [2, 8], [7, 9, 3]])

    class Once:
        def grow(self, source, slots, pending, budgets, noise):
            source.start(slots)
            for done, count in itertools.pairwise((1, 3, 6, 8)):
                levels = [0, *sorted(range(1, len(tree)), key=lambda node: tree.depths[node])][:count]
                source.extend(slots, [_ordered(tree, levels)], [done])
            seen.append((source._seats[slots[0]].states.clone(), _ordered(tree, levels)))
            return [from_paths(pending[0], [])]

        def observe(self, slot, record) -> None: ...

    seen: list = []
    source = Eagle3Source(net, loaded.model.get_input_embeddings())
    run(loaded, recipe(source, Once()), [[*prompt, 9]], max_new_tokens=2)
    states, grown = seen[0]
    for node in range(1, len(grown)):
        text = [*prompt, 9, *grown.path_tokens(node), 0]
        _, embedded, true = look(loaded, net, torch.tensor([text]))
        depth = int(grown.depths[node])
        steps = list(unrolled(net, embedded, true, depth + 1))
        torch.testing.assert_close(states[node], steps[depth][0, len(prompt) - 1 + depth + 1 - 1], atol=1e-5, rtol=1e-4)


def _ordered(tree, nodes):
    """The tree with its nodes in this order."""
    from outrider.tree import fixed

    place = {node: i for i, node in enumerate(nodes)}
    parents = np.array([place.get(int(tree.parents[node]), NOTHING) for node in nodes])
    return fixed(tree.tokens[nodes], parents)


def test_a_drafter_that_was_off_catches_up(loaded, net) -> None:
    class Late:
        name, calls = "late", 0

        def begin(self, slot) -> None: ...
        def end(self, slot) -> None: ...
        def observe(self, slots, records, timing) -> None: ...
        def size(self, slots, proposals, budgets, load, seconds):
            return list(proposals)

        def plan(self, slots, limits, load):
            self.calls += 1
            return [Budget(0, 0) if self.calls < AT_ONCE + 20 else Budget(4, 2) & limit for limit in limits]

    source = Watched(net, loaded)
    made = Recipe("eagle3", Grown(source, TopK(depth=2)), Invariant(), Late())
    result = run(loaded, made, [PROMPTS[0]], max_new_tokens=AT_ONCE + 40)[0]
    assert result.token_ids == run(loaded, PLAIN, [PROMPTS[0]], max_new_tokens=AT_ONCE + 40)[0].token_ids
    assert result.stats.drafted > 0


def test_it_proposes_only_its_own_tokens_as_the_targets_ids(loaded, net) -> None:
    source = Eagle3Source(net, loaded.model.get_input_embeddings())
    results = run(loaded, recipe(source, TopK(depth=3)), temperature=1.0, seed=5)
    drafted = [t for g in results for t, origin in zip(g.token_ids, g.origins, strict=True) if origin.depth]
    assert drafted and all(token % 2 == 0 and token < 52 for token in drafted)


@pytest.mark.parametrize("masked", [False, True])
def test_attention_spelled_out_is_torchs(masked: bool) -> None:
    from outrider.draft.eagle3 import _softmax_attention

    torch.manual_seed(0)
    q, k, v = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 9, 8), torch.randn(2, 3, 9, 8)
    mask = torch.rand(2, 1, 5, 9) > 0.4 if masked else None
    if mask is not None:
        mask[..., 0] = True
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    torch.testing.assert_close(_softmax_attention(q, k, v, mask), want)
