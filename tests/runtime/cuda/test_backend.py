"""The graphs runtime: on CUDA as it is; elsewhere the same step without a graph, on the kernels' reference."""

from __future__ import annotations

import copy
import logging
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch

from outrider.core.errors import UnsupportedModel
from outrider.core.records import Needs
from outrider.core.tree import chain, fixed, root
from outrider.runtime import choice
from outrider.runtime.cuda import backend as graphed
from outrider.runtime.cuda import reference
from outrider.runtime.cuda.fusion import Fusion, Lazy, real
from outrider.runtime.slots import SlotTarget
from outrider.runtime.targets import cuda_target, eager_target
from tests.runtime.running import run_text, run_trees, shorter_prefixes, together_and_apart
from tests.runtime.test_architectures import CAUGHT, ZOO, build, walk
from tests.runtime.test_steps import PROMPT, TREE, close, level_by_level_equals_one_verify, logits, open_slot, small

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
needs_cuda = pytest.mark.skipif(not GPU, reason="needs CUDA")

# What cannot be recorded runs eagerly instead: experts chosen by the data, attention code of a model's own.
CUSTOM_ATTENTION = {name for name in ZOO if name.startswith("falcon")}
BY_DATA = {"mixtral", "qwen3-moe", "gpt-oss", "llama-dynamic-rope", "phi3-long-rope"}
RECORDED = [name for name in ZOO if name not in CUSTOM_ATTENTION and not (GPU and name in BY_DATA)]


@cache
def placed(name: str) -> Any:
    return copy.deepcopy(build(name)).to(DEVICE)


runtime = partial(cuda_target, warm_up=False)


@pytest.fixture
def target() -> SlotTarget:
    return runtime(small().to(DEVICE), max_slots=4, max_rows=16)


# Scores


@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("name", RECORDED)
def test_trees_equal_independent_forwards(name: str, batch: int) -> None:
    for seed in range(2):
        assert walk(placed(name), batch=batch, seed=seed, steps=12, chunk=16, runtime=runtime) < 1e-4


def test_wider_trees_than_one_word_and_than_any_bucket() -> None:
    assert walk(placed("llama"), batch=2, seed=1, steps=6, chunk=16, nodes=100, runtime=runtime) < 1e-4
    assert walk(placed("llama"), batch=2, seed=2, steps=4, chunk=16, nodes=200, runtime=runtime) < 1e-4


@pytest.mark.parametrize("fuse", [False, True])
def test_fused_or_not_the_model_is_the_same(fuse: Any) -> None:
    made_so = partial(runtime, fuse=fuse)
    assert walk(placed("qwen3"), batch=2, seed=5, steps=6, chunk=16, runtime=made_so) < 1e-4


def halves(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A product in two parts, as a kernel may leave it."""
    cut = weight.shape[1] // 2
    sides = (slice(0, cut), slice(cut, None))
    return torch.stack([torch.nn.functional.linear(x[..., side], weight[:, side]) for side in sides])


@pytest.mark.skipif(GPU, reason="the reference is not recorded in CUDA graphs")
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2"])
def test_a_product_left_in_parts_is_added_up_by_whoever_reads_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(reference, "parts", lambda *given: made.append(1) or halves(*given))
    made_so = partial(runtime, ops=reference)
    assert walk(placed(name), batch=2, seed=6, steps=6, chunk=16, runtime=made_so) < 1e-4
    assert made or name == "gemma2"  # there a norm stands before the residual
    if made:
        monkeypatch.setattr(reference, "parts", lambda *given: halves(*given)[:1])  # a part is lost
        with pytest.raises(UnsupportedModel, match="differently as a graph"):
            made_so(placed(name), max_slots=2)


def sees_siblings(step: graphed.Step, packed: Any, *args: Any) -> None:
    FILL(step, packed, *args)
    for b, begin in zip(packed.blocks, packed.begins, strict=True):
        step._fields["words"][begin : begin + b.rows, 0] = (1 << np.arange(1, b.rows + 1)) - 1


def forgets_moves(step: graphed.Step, packed: Any, moves: Any) -> None:
    FILL(step, packed, [[] for _ in moves])


def counts_one_more(step: graphed.Step, *args: Any) -> None:
    FILL(step, *args)
    step._fields["lengths"][:] += 1


def takes_the_rows_before(step: graphed.Step, *args: Any) -> None:
    FILL(step, *args)
    step._fields["begins"][1:-1] -= 1


def takes_text_for_a_tree(step: graphed.Step, *args: Any) -> None:
    FILL(step, *args)
    step._fields["causal"][:] = 0


FILL = graphed.Step.fill


@pytest.mark.parametrize(
    "bug", [sees_siblings, forgets_moves, counts_one_more, takes_the_rows_before, takes_text_for_a_tree]
)
def test_a_planted_bug_is_caught(bug: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(*args: Any, **named: Any) -> SlotTarget:
        made = runtime(*args, **named)
        monkeypatch.setattr(graphed.Step, "fill", bug)
        return made

    assert walk(placed("llama"), batch=2, seed=3, steps=4, chunk=16, runtime=late, enough=CAUGHT) > CAUGHT


@pytest.mark.parametrize("bug", [sees_siblings, counts_one_more, takes_the_rows_before, takes_text_for_a_tree])
def test_the_check_at_load_finds_it_too(bug: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphed.Step, "fill", bug)
    with pytest.raises(UnsupportedModel, match="differently as a graph"):
        runtime(placed("llama"), max_slots=2)


def test_the_likeliest_tokens_come_with_the_scores(target: SlotTarget) -> None:
    slots = [open_slot(target), open_slot(target, PROMPT[:3])]
    for scores in run_trees(target, slots, [TREE, root(8)], Needs()):
        assert scores.logits is not None and scores.likeliest is not None
        assert list(scores.likeliest) == scores.logits.argmax(-1).tolist()


def test_scores_outlive_the_next_step(target: SlotTarget) -> None:
    slot = open_slot(target)
    (first,) = run_trees(target, [slot], [TREE], Needs(hidden=(1,)))
    assert first.logits is not None
    before = first.logits.clone(), first.hidden[1].clone()
    run_trees(target, [slot], [chain(3, [1] * 6)], Needs(hidden=(1,)))
    assert torch.equal(first.logits, before[0]) and torch.equal(first.hidden[1], before[1])


def test_hidden_states_are_transformers_own(target: SlotTarget) -> None:
    needs = Needs(hidden=(0, 2, -1))
    with torch.no_grad():
        text = torch.tensor([[*PROMPT, 3, 12]], device=DEVICE)
        plain = target.backend.model(text, output_hidden_states=True).hidden_states
    slot = open_slot(target)
    (scores,) = run_trees(target, [slot], [TREE], needs)
    for layer in needs.hidden:
        assert close(scores.hidden[layer][[0, 1, 3]], plain[layer][0, len(PROMPT) - 1 :])


def test_growing_a_tree_level_by_level_equals_one_verify(target: SlotTarget) -> None:
    level_by_level_equals_one_verify(target)


# Commits that wait for the next step


def committed(target: SlotTarget) -> int:
    slot = open_slot(target)
    logits(target, slot)
    target.commit([slot], [[2, 5]])
    assert target.backend.cache.waiting
    return slot


def expected() -> torch.Tensor:
    eager = eager_target(small().to(DEVICE), max_slots=1, max_rows=16)
    slot = open_slot(eager)
    logits(eager, slot)
    eager.commit([slot], [[2, 5]])
    return logits(eager, slot, root(11))


def test_what_waits_is_done_before_anything_looks(target: SlotTarget) -> None:
    assert close(logits(target, committed(target), root(11)), expected())
    twin = target.fork(committed(target))
    assert close(logits(target, twin, root(11)), expected())
    slot = committed(target)
    run_text(target, [slot], [[11, 12]], Needs())
    assert not target.backend.cache.waiting.get(slot)
    assert target.length(slot) == len(PROMPT) - 1 + 3 + 1


@pytest.mark.parametrize("where", ["fill", "hold", "run"])
def test_a_pass_that_fails_leaves_what_waits_to_the_next(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything ran, in the middle of the model, and after it."""
    target = runtime(small().to(DEVICE), max_slots=4, max_rows=16, capture=False)  # the model runs each time
    logits(target, open_slot(target, PROMPT[:3]), root(4))
    slot, right = committed(target), getattr(graphed.Step, where)
    with monkeypatch.context() as patch:

        def fails(*args: Any) -> None:
            if where == "run":
                right(*args)
            raise RuntimeError("on purpose")

        patch.setattr(graphed.Step, where, fails)
        with pytest.raises(RuntimeError, match="on purpose"):
            logits(target, slot, root(11))
    assert close(logits(target, slot, root(11)), expected())


def test_a_released_slot_takes_its_moves_along(target: SlotTarget) -> None:
    slot = committed(target)
    target.release(slot)
    assert not target.backend.cache.waiting and open_slot(target) == slot
    eager = eager_target(small().to(DEVICE), max_slots=1, max_rows=16)
    assert close(logits(target, slot), logits(eager, open_slot(eager)))


@pytest.mark.parametrize("length", [1, 5, 20])
def test_a_shorter_prefix_is_as_if_there_had_been_no_more(target: SlotTarget, length: int) -> None:
    for want, got in shorter_prefixes(target, [n % 61 for n in range(3, 33)], length):
        assert close(want.logits, got.logits)


def test_text_and_trees_together_equal_separate_passes(target: SlotTarget) -> None:
    for one, two in together_and_apart(target, PROMPT, TREE, [4, 5]):
        assert close(one.logits, two.logits)


def test_paths_longer_than_a_graph_can_move() -> None:
    model = small(max_position_embeddings=200).to(DEVICE)
    pending = [7, *range(1, 50)]
    parents = np.array([-1, 0, *([0] + list(range(2, 49)))])  # node 1 is a dead end, so all others move by one
    tree = fixed(np.array(pending), parents)
    out = []
    for target in (runtime(model, max_slots=1), eager_target(model, max_slots=1)):
        slot = open_slot(target)
        logits(target, slot, tree)
        target.commit([slot], [tree.path(len(tree) - 1)])
        out.append(logits(target, slot, root(3)))
    assert close(*out)


# The caller's model, refusals and fallbacks


def test_the_model_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small().to(DEVICE)
    prompt, settings = torch.tensor([PROMPT], device=DEVICE), {"max_new_tokens": 6, "do_sample": False}
    before = model.generate(prompt, **settings)
    target = runtime(model, max_slots=1)
    logits(target, open_slot(target))
    assert not any("forward" in m.__dict__ for m in model.modules())
    assert torch.equal(model.generate(prompt, **settings), before)
    monkeypatch.setattr(graphed.StepCache, "update", lambda *_: 1 / 0)
    with pytest.raises(UnsupportedModel, match="cannot be recorded"):
        runtime(model, max_slots=1)
    assert not any("forward" in m.__dict__ for m in model.modules())
    assert torch.equal(model.generate(prompt, **settings), before)


def test_keys_that_layers_share_and_norms_without_a_weight_are_recorded() -> None:
    assert walk(placed("gemma3n"), batch=3, seed=1, steps=6, chunk=16, runtime=partial(runtime, capture=False)) < 1e-4


@needs_cuda
def test_too_little_memory_for_graphs_runs_without_them(caplog: pytest.LogCaptureFixture) -> None:
    model = small().to(DEVICE)
    target = runtime(model, max_slots=1, graph_bytes=10_000)  # of the smallest alone
    with caplog.at_level(logging.WARNING):
        slot = open_slot(target)
        got = logits(target, slot)
    assert "without a graph" in caplog.text
    eager = eager_target(model, max_slots=1)
    assert close(got, logits(eager, open_slot(eager)))


@needs_cuda
def test_bfloat16_on_the_kernels() -> None:
    """Wide enough for the streaming projections; judged by what bfloat16 itself loses."""
    wide = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "initializer_range": 0.06}
    exact = small(**wide).to(DEVICE)
    model = copy.deepcopy(exact).to(torch.bfloat16)
    text = torch.tensor([[*PROMPT, 3, 12]], device=DEVICE)
    with torch.no_grad():
        want, lost = exact(text).logits[0, -3:], model(text).logits[0, -3:].float()
    for fuse in (True, False):
        target = runtime(model, max_slots=2, fuse=fuse)
        got = logits(target, open_slot(target))[[0, 1, 3]].float()
        assert (got - want).norm() < 1.5 * (lost - want).norm() + 5e-3 * want.norm()


# Fusion


@pytest.mark.parametrize("streams", [True, False])
def test_a_layer_is_four_launches_of_projections(streams: bool) -> None:
    """Or, where torch multiplies, four products with a gate and two norms that take the sum in."""
    model = small().to(DEVICE)
    calls: list[str] = []

    class Counted:
        def __getattr__(self, name: str) -> Any:
            def call(*args: Any, **named: Any) -> Any:
                if name == "project":
                    around = {"n": named.get("norm"), "r": named.get("residual"), "g": named.get("gated")}
                    calls.append(str(len(args[1])) + "".join(k for k, v in around.items() if v is not None))
                elif name in ("rms_norm", "add_norm", "gate"):
                    calls.append(name)
                return getattr(reference, name)(*args, **named)

            return call

        def streams(self, *_: Any) -> bool:
            return streams

    ids = torch.tensor([PROMPT], device=DEVICE)
    with torch.inference_mode():
        want = model(ids).logits
        fusion = Fusion(model, Counted(), lambda: model(ids))
        with fusion.active():
            got = model(ids).logits
            assert isinstance(got, Lazy)
            assert close(real(got), want)
    layer = ["3n", "1r", "2ng", "1r"] if streams else ["add_norm", "gate", "add_norm"]
    assert calls == ([*layer * 3, "rms_norm", "1"] if streams else ["rms_norm", *layer * 3])


@pytest.mark.parametrize("name", ["gemma2", "cohere", "gpt-neox"])
def test_what_is_not_the_usual_formula_stays_the_models_own(name: str) -> None:
    """Norms of another formula and rotary functions of another layout must not be taken over."""
    model = placed(name)
    ids = torch.tensor([PROMPT], device=DEVICE)
    with torch.inference_mode():
        want = model(ids).logits
        fusion = Fusion(model, reference, lambda: model(ids))
        with fusion.active():
            assert close(real(model(ids).logits), want)


@needs_cuda
def test_what_asks_the_device_falls_back_and_leaves_torch_whole(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        made = choice.build(placed("llama-dynamic-rope"), max_slots=1)
    assert made.traits.runtime == "eager"
    assert "runtime graphs is left out" in caplog.text
    torch.randn(3, device=DEVICE)  # a capture that failed would have left the generator unusable


def test_steps_that_were_prepared_are_not_recorded_in_the_middle_of_a_text(target: SlotTarget) -> None:
    recordings, needs = target.backend.recordings, Needs(hidden=(1, 2), top=4)  # type: ignore[attr-defined]
    slot = open_slot(target)  # a prompt's pass is of a size of its own
    target.prepare((), needs)
    known = set(recordings.steps)
    alone = {size.bucket.rows for size in known if (size.hidden, size.top, size.bucket.sequences) == ((1, 2), 4, 1)}
    assert {1, 2, 4, 8, 16} <= alone
    for tree in (root(3), fixed(TREE.tokens[:2], TREE.parents[:2]), TREE):
        assert set(run_trees(target, [slot], [tree], needs)[0].hidden) == {1, 2}
    assert set(recordings.steps) == known
    target.prepare((100, 300), needs)
    assert set(recordings.steps) == known
