"""Each kind of recurrence by itself: a tree in one pass equals its paths, and a state goes on where a text ends."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from outrider.core.tree import TokenTree, fixed
from outrider.runtime.recurrent.ancestry import Ancestry, chain
from outrider.runtime.recurrent.convolution import Convolution
from outrider.runtime.recurrent.linear import Decayed, DeltaRule
from outrider.runtime.recurrent.recurrence import Recurrence
from outrider.runtime.recurrent.selective import GatedUnit, SelectiveScan, WeightedMean

CPU = torch.device("cpu")
HEADS, GROUPS, KEY, VALUE, WIDTH = 4, 2, 5, 3, 6
SHAPES = {
    "chain": [-1, 0, 1, 2, 3, 4, 5, 6],
    "star": [-1, 0, 0, 0, 0, 0, 0, 0],
    "binary": [-1, 0, 0, 1, 1, 2, 2, 3],
    "mixed": [-1, 0, 1, 0, 3, 2, 4, 6],
}


def normal(*shape: int) -> Tensor:
    return torch.randn(shape)


def rows(kind: str, count: int, batch: int = 2) -> tuple[Recurrence, list[Tensor]]:
    lead = (batch, count)
    keys, values = normal(*lead, HEADS, KEY), normal(*lead, HEADS, VALUE)
    unit = keys / keys.norm(dim=-1, keepdim=True)
    betas = normal(*lead, HEADS).sigmoid()
    match kind:
        case "decayed":
            grouped = [normal(*lead, GROUPS, KEY) for _ in range(2)]
            return Decayed(), [-normal(*lead, HEADS, 1).exp(), grouped[0], values, grouped[1]]
        case "decayed by channel":
            return Decayed(), [-normal(*lead, HEADS, KEY).exp(), keys, values, normal(*lead, HEADS, KEY)]
        case "delta rule":
            decays = -normal(*lead, HEADS, 1).exp()
            return DeltaRule(), [decays, betas, unit, values, normal(*lead, HEADS, KEY)]
        case "delta rule by channel":
            decays = -normal(*lead, HEADS, KEY).exp()
            return DeltaRule(), [decays, betas, unit, values, normal(*lead, HEADS, KEY)]
        case "selective scan":
            steps = normal(*lead, WIDTH).exp()
            scan = SelectiveScan(-normal(WIDTH, KEY).exp())
            return scan, [steps, normal(*lead, WIDTH), normal(*lead, KEY), normal(*lead, KEY)]
        case "gated unit":
            return GatedUnit(), [normal(*lead, WIDTH).sigmoid(), normal(*lead, WIDTH)]
        case "weighted mean":
            return WeightedMean(-normal(WIDTH).exp(), normal(WIDTH)), [normal(*lead, WIDTH), normal(*lead, WIDTH)]
    return Convolution(normal(WIDTH, 4), normal(WIDTH), "silu"), [normal(*lead, WIDTH)]


KINDS = [
    "decayed", "decayed by channel", "delta rule", "delta rule by channel", "selective scan", "gated unit",
    "weighted mean", "convolution",
]  # fmt: skip


def behind(kind: Recurrence, text: list[Tensor], batch: int) -> Tensor:
    """The state behind a text."""
    state = kind.begin(text).expand(batch, *kind.begin(text).shape)
    return kind.advance(state, text[: kind.kept], torch.full((batch,), text[0].shape[1]))


def tree_of(parents: list[int]) -> TokenTree:
    return fixed(np.arange(len(parents)), np.array(parents))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_tree_equals_its_paths(kind: str, shape: str) -> None:
    torch.manual_seed(1)
    parents = SHAPES[shape]
    recurrence, both = rows(kind, 9 + len(parents))
    text, flight = [r[:, :9] for r in both], [r[:, 9:] for r in both]
    state, tree = behind(recurrence, text, 2), tree_of(parents)
    sees = np.broadcast_to(tree.ancestor_mask(), (2, len(tree), len(tree)))
    got = recurrence.outputs(state, flight, Ancestry(sees, CPU))
    for node in range(len(tree)):
        path = [0, *tree.path(node)] if node else [0]
        along = [r[:, path] for r in flight]
        whole = [torch.cat([t, a], 1) for t, a in zip(text, along, strict=True)]
        start = recurrence.begin(whole).expand(2, *recurrence.begin(whole).shape)
        want = recurrence.outputs(start, whole, chain(2, 9 + len(path), CPU))[:, -1]
        assert (got[:, node] - want).abs().max() < 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_behind_some_rows_knows_nothing_of_the_others(kind: str) -> None:
    """Different numbers of rows in two slots; what comes behind them may be anything."""
    torch.manual_seed(2)
    recurrence, text = rows(kind, 7)
    start = recurrence.begin(text).expand(2, *recurrence.begin(text).shape)
    got = recurrence.advance(start, text[: recurrence.kept], torch.tensor([3, 6]))
    for slot, count in enumerate((3, 6)):
        want = behind(recurrence, [r[slot : slot + 1, :count] for r in text], 1)
        assert (got[slot] - want[0]).abs().max() < 1e-5


def test_strong_decays_neither_overflow_nor_vanish_into_nan() -> None:
    """Rows that do not see each other differ by more than an exponential holds."""
    torch.manual_seed(3)
    recurrence, text = rows("decayed", 8)
    text[0] = text[0] * 1e4
    tree = tree_of(SHAPES["binary"])
    sees = np.broadcast_to(tree.ancestor_mask(), (2, 8, 8))
    state = behind(recurrence, text, 2)
    assert torch.isfinite(state).all()
    assert torch.isfinite(recurrence.outputs(state, text, Ancestry(sees, CPU))).all()


def test_a_chain_is_the_chunk_scan_of_mamba2() -> None:
    torch.manual_seed(4)
    count, inputs, steps = 11, normal(1, 11, HEADS, VALUE), normal(1, 11, HEADS).exp()
    rates, into, out_of = -normal(HEADS).exp(), normal(1, count, GROUPS, KEY), normal(1, count, GROUPS, KEY)
    want, last = mamba2_chunk_scan(
        inputs, steps, rates, into, out_of, chunk_size=4, return_final_states=True, dt_softplus=False
    )
    text = [(rates * steps)[..., None], into, inputs * steps[..., None], out_of]
    start = Decayed().begin(text)[None]
    assert (Decayed().outputs(start, text, chain(1, count, CPU)) - want).abs().max() < 1e-5
    assert (Decayed().advance(start, text[:3], torch.tensor([count])) - last).abs().max() < 1e-5


def test_a_chain_is_the_recurrence_of_the_gated_delta_rule() -> None:
    torch.manual_seed(5)
    recurrence, text = rows("delta rule", 11, batch=1)
    decays, betas, keys, values, queries = text
    want, last = torch_recurrent_gated_delta_rule(
        queries * KEY**0.5, keys, values, g=decays[..., 0], beta=betas, output_final_state=True
    )
    assert last is not None
    start = recurrence.begin(text)[None]
    assert (recurrence.outputs(start, text, chain(1, 11, CPU)) - want).abs().max() < 1e-5
    state = recurrence.advance(start, text[:4], torch.tensor([11]))
    assert (state - last.transpose(2, 3)).abs().max() < 1e-5


def test_every_product_with_weights_runs_once_for_all_rows_of_a_tree() -> None:
    from tests.runtime.recurrent.families import build, unchecked
    from tests.runtime.running import run_text, run_trees

    model = build("mamba2")
    target = unchecked(model, max_slots=1)
    slot = target.acquire()
    run_text(target, [slot], [[3, 1, 4]])
    seen: list[int] = []
    hook = model.backbone.layers[0].mixer.norm.register_forward_hook(lambda _, args, __: seen.append(args[0].shape[1]))
    run_trees(target, [slot], [tree_of(SHAPES["binary"])])
    target.commit([slot], [[1, 3, 7]])
    hook.remove()
    assert seen == [8]
