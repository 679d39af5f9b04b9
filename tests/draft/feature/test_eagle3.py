"""One-layer drafters at run time: what training computes, caches that follow the text, whatever the batch or tree.

EAGLE-3, EAGLE-2 and FSPAD go through the same tests, since they share source and cache.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.control.fixed import Fixed
from outrider.core.engine import Engine
from outrider.core.protocols import Recipe
from outrider.core.records import Budget, Chunk, Needs, Scores
from outrider.core.sampling import SamplingParams
from outrider.core.schedule import run_texts
from outrider.core.tree import NOTHING, from_paths
from outrider.draft.feature.eagle3 import Eagle3Source
from outrider.draft.feature.text import ROWS_AT_ONCE, Seat
from outrider.draft.grown import Grown
from outrider.grow.chain import Chain
from outrider.grow.dyspec import Threshold
from outrider.grow.topk import TopK
from outrider.models import load_model
from outrider.models.networks.eagle2 import Eagle2Layer
from outrider.models.networks.eagle3 import Eagle3Layer, Eagle3Shape
from outrider.models.networks.fspad import FspadLayer, FspadShape
from outrider.models.trained import target_head
from outrider.runtime.layers.plain import PlainDriver, softmax_attention
from outrider.runtime.slots import SlotTarget
from outrider.runtime.targets import eager_target
from outrider.train.kinds.eagle3 import look, unrolled
from outrider.verify.invariant import Invariant
from outrider.verify.recursive import Recursive
from outrider.verify.rejection import Rejection
from tests.draft.toy_loop import history

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


def source_of(net, loaded) -> Eagle3Source:
    return Eagle3Source(PlainDriver(net, loaded.model.get_input_embeddings()))


class Watched(Eagle3Source):
    """After every step: what is cached and what waits equals a fresh source over the same text."""

    def __init__(self, net, loaded) -> None:
        super().__init__(PlainDriver(net, loaded.model.get_input_embeddings()))
        self.loaded, self.lengths, self.steps = loaded, set(), 0

    @torch.inference_mode()
    def observe(self, slots, records) -> None:
        super().observe(slots, records)
        for slot, record in zip(slots, records, strict=True):
            if len(record.emitted) == record.gain:
                self.compare(slot, record)

    def compare(self, slot, record) -> None:
        self.lengths.add((len(record.verdict.path), record.tree.depth))
        self.steps += 1
        text = self._seats[slot].context.tokens.tolist()
        states = self.driver.forward([self._text(slot, self._seats[slot])])[0]
        mine = self._distributions([slot], [states[-1:]])[0][0]
        fresh = probs_after(self.driver.net, self.loaded, text)
        assert np.array_equal(mine.ids, fresh.ids)
        np.testing.assert_allclose(mine.probs, fresh.probs, atol=1e-5)


def probs_after(net, loaded, text: list[int]):
    """The first step of the training unroll, over the target's ids, likeliest first."""
    from outrider.core.tree import QRow

    _, embedded, state = look(loaded, net, torch.tensor([text]))
    row = net.logits(next(iter(unrolled(net, embedded, state, 1)))[0, len(text) - 2]).softmax(-1)
    order = torch.sort(row, descending=True, stable=True).indices
    return QRow(net.ids[order].numpy(), row[order].double().numpy())


def target_of(model, prompt_rows: int = 512) -> SlotTarget:
    return eager_target(model, max_slots=4, prompt_rows=prompt_rows)


def run(loaded, recipe: Recipe, prompts=PROMPTS, chunk: int = 512, **sampling) -> list:
    engine = Engine(target_of(loaded.model, chunk), PLAIN, strict=True)
    handles = [engine.submit(p, SamplingParams(**{"max_new_tokens": 25} | sampling), recipe) for p in prompts]
    return [handle.result() for handle in handles]


def recipe(source: Eagle3Source, grower, verifier=None, budget: int = 8, depth: int = 4) -> Recipe:
    rule = verifier or Invariant()
    return Recipe("eagle3", Grown(source, grower, sampled=rule.coupled), rule, Fixed(Budget(budget, depth)))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_cache_and_distributions_equal_a_fresh_recomputation_after_every_step(loaded, net, temperature: float) -> None:
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

        def observe(self, slots, records) -> None: ...

    source = Watched(net, loaded)
    result = run(loaded, recipe(source, Told()), [PROMPTS[0]])[0]
    assert result.token_ids == plain and (3, 3) in source.lengths


@pytest.mark.parametrize(
    "grower", [Chain(), TopK(beam=3, branch=3, depth=4), Threshold(4)], ids=lambda g: type(g).__name__
)
def test_greedy_text_is_the_targets(loaded, net, grower) -> None:
    source = source_of(net, loaded)
    drafted = run(loaded, recipe(source, grower))
    assert [g.token_ids for g in drafted] == [g.token_ids for g in run(loaded, PLAIN)]
    assert sum(g.stats.drafted for g in drafted) > 100


def test_invariant_sampling_gives_the_targets_text(loaded, net) -> None:
    source = source_of(net, loaded)
    settings = {"temperature": 0.9, "seed": 7}
    drafted = run(loaded, recipe(source, TopK(depth=4)), **settings)
    assert [g.token_ids for g in drafted] == [g.token_ids for g in run(loaded, PLAIN, **settings)]


@pytest.mark.parametrize("rule", [Rejection(), Recursive()], ids=lambda rule: rule.name)
def test_sampled_drafts_run_under_coupled_rules(loaded, net, rule) -> None:
    grower = Chain() if rule.name == "rejection" else Threshold(3)
    source = source_of(net, loaded)
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
        source = source_of(net, loaded)
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

        def observe(self, slots, records) -> None: ...

    seen: list = []
    source = source_of(net, loaded)
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
    from outrider.core.tree import fixed

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
            return [Budget(0, 0) if self.calls < ROWS_AT_ONCE + 20 else Budget(4, 2) & limit for limit in limits]

    source = Watched(net, loaded)
    made = Recipe("eagle3", Grown(source, TopK(depth=2)), Invariant(), Late())
    result = run(loaded, made, [PROMPTS[0]], max_new_tokens=ROWS_AT_ONCE + 40)[0]
    assert result.token_ids == run(loaded, PLAIN, [PROMPTS[0]], max_new_tokens=ROWS_AT_ONCE + 40)[0].token_ids
    assert result.stats.drafted > 0


def test_it_proposes_only_its_own_tokens_as_the_targets_ids(loaded, net) -> None:
    source = source_of(net, loaded)
    results = run(loaded, recipe(source, TopK(depth=3)), temperature=1.0, seed=5)
    drafted = [t for g in results for t, origin in zip(g.token_ids, g.origins, strict=True) if origin.depth]
    assert drafted and all(token % 2 == 0 and token < 52 for token in drafted)


@pytest.mark.parametrize("masked", [False, True])
def test_attention_spelled_out_is_torchs(masked: bool) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 9, 8), torch.randn(2, 3, 9, 8)
    mask = torch.rand(2, 1, 5, 9) > 0.4 if masked else None
    if mask is not None:
        mask[..., 0] = True
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    torch.testing.assert_close(softmax_attention(q, k, v, mask), want)


class Behind(Eagle3Source):
    """Is handed what ran of a prompt from position `unseen` on, as behind a prefix that the target held already."""

    unseen = 0

    def absorb(self, chunks) -> None:
        super().absorb([cut(chunk, self.unseen) for chunk in chunks if chunk.start + len(chunk.tokens) > self.unseen])


def cut(chunk: Chunk, first: int) -> Chunk:
    skip = max(0, first - chunk.start)
    hidden = {layer: states[skip:] for layer, states in chunk.scores.hidden.items()}
    return Chunk(chunk.slot, chunk.start + skip, chunk.tokens[skip:], Scores(None, hidden))


def needs_of(net) -> Needs:
    return Needs(hidden=net.shape.layers)


def halves(chunk: Chunk) -> list[Chunk]:
    """As if a prompt had run in two pieces."""
    count = len(chunk.tokens) // 2
    hidden = {layer: states[:count] for layer, states in chunk.scores.hidden.items()}
    first = Chunk(chunk.slot, chunk.start, chunk.tokens[:count], Scores(None, hidden))
    return [first, cut(chunk, chunk.start + count)]


def test_prompts_absorbed_in_one_call_leave_what_one_by_one_leaves(loaded, net) -> None:
    """Of three lengths in two calls: trees, and keys and values, are those of each prompt by itself."""
    prompts = [[1, 2, 3, 4, 9, 8, 7], [5, 9, 30, 2], list(range(3, 33))]
    target = target_of(loaded.model)
    slots = [target.acquire() for _ in prompts]
    texts = [(slot, prompt[:-1]) for slot, prompt in zip(slots, prompts, strict=True)]
    (ran,) = run_texts(target, texts, needs_of(net))
    chunks = [part for chunk in ran for part in halves(chunk)]
    calls = {"together": [chunks[::2], chunks[1::2]], "alone": [[chunk] for chunk in chunks]}
    trees, cached = {}, {}
    for kind, parts in calls.items():
        driver = PlainDriver(net, loaded.model.get_input_embeddings())
        source = Eagle3Source(driver)
        for slot, prompt in zip(slots, prompts, strict=True):
            source.begin(slot, history(prompt, 53))
        for part in parts:
            source.absorb(part)
        made = TopK(depth=3).grow(source, slots, [p[-1] for p in prompts], [Budget(6, 3)] * 3, [None] * 3)
        trees[kind] = [(tree.tokens.tolist(), tree.parents.tolist()) for tree in made]
        cached[kind] = [part[slot, :, : len(text)] for part in driver.cache.whole for slot, text in texts]
    assert trees["together"] == trees["alone"]
    for one, other in zip(cached["together"], cached["alone"], strict=True):
        assert one.any()
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_rows_behind_a_gap_stand_at_their_positions_in_the_text(loaded, net) -> None:
    """The first of a prompt is never seen: positions, the tokens that are read, and the tree's levels."""
    prompt, unseen = list(range(3, 23)), 12
    ran: list = []
    target = target_of(loaded.model)
    slot = target.acquire()
    ((chunk,),) = run_texts(target, [(slot, prompt[:-1])], needs_of(net))
    source = source_of(net, loaded)
    forward = source.driver.forward
    source.driver.forward = lambda pieces: ran.extend(pieces) or forward(pieces)
    source.begin(slot, history(prompt, 53))
    source.absorb([cut(chunk, unseen)])
    source.start([slot])
    source.extend([slot], [from_paths(prompt[-1], [[2], [4]])], [1])
    assert [piece.positions.tolist() for piece in ran] == [list(range(unseen, 18)), [18], [19, 19]]
    assert [piece.start for piece in ran] == [0, 18 - unseen, 19 - unseen]
    assert ran[0].tokens + ran[1].tokens == prompt[unseen + 1 :]


@pytest.fixture(scope="module")
def shipped(smollm2):
    """A trained layer, a prompt, the prompt's greedy continuation, and how that was asked for."""
    from outrider.models.drafts import shipped_draft
    from outrider.models.trained import load_eagle3

    folder = shipped_draft(smollm2, "eagle3")
    assert folder is not None
    said = "<|im_start|>user\nWrite a short letter to a friend about a walk in the mountains.<|im_end|>\n"
    prompt = smollm2.tokenizer.encode(f"{said}<|im_start|>assistant\n")
    settings = {"max_new_tokens": 48, "ignore_eos": True}
    return load_eagle3(folder, smollm2), prompt, run(smollm2, PLAIN, [prompt], **settings)[0].token_ids, settings


def accepted(smollm2, shipped, kind: type[Behind], unseen: int) -> float:
    """Tokens a step, of chains; the text is the target's whatever is drafted."""
    layer, prompt, plain, settings = shipped
    source = kind(PlainDriver(layer, smollm2.model.get_input_embeddings()))
    source.unseen = unseen
    made = run(smollm2, recipe(source, Chain(), budget=4), [prompt], **settings)[0]
    assert made.token_ids == plain
    return made.stats.new_tokens / made.stats.steps


def test_behind_a_prefix_it_never_saw_it_drafts_nearly_as_well(smollm2, shipped, monkeypatch) -> None:
    """Most of a prompt missed, and all of it; a source that takes what it is handed for the first of the text fails."""

    class Misplaced(Behind):
        def begin(self, slot, context) -> None:
            super().begin(slot, context)
            self._seats[slot].missed = 0

    end = len(shipped[1]) - 1
    whole = accepted(smollm2, shipped, Behind, 0)
    floor, low = 1 + 0.7 * (whole - 1), 1 + 0.25 * (whole - 1)
    assert whole > 2
    assert accepted(smollm2, shipped, Behind, end - 6) > floor
    assert accepted(smollm2, shipped, Behind, end) > low  # the first words are guessed from nothing
    monkeypatch.setattr(Seat, "starts_at", lambda seat, position: None)
    assert accepted(smollm2, shipped, Misplaced, end - 6) < floor - 0.2
    assert accepted(smollm2, shipped, Misplaced, end) < low
