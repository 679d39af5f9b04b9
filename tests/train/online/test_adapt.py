"""A drafter that learns while it is used: it gets better, a bad update is taken back, the text stays the target's."""

from __future__ import annotations

import threading
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from outrider.api import Outrider
from outrider.core.errors import InputError
from outrider.models import LoadedModel, load_model
from outrider.models.drafts import DraftCard, packed, read_card, write_drafter
from outrider.models.networks.eagle3 import Eagle3Layer, Eagle3Shape
from outrider.models.trained import load_eagle3
from outrider.train.losses import LOSSES
from outrider.train.online import student
from outrider.train.online.adapt import Adaptation, AdaptPlan, adapt, begin
from outrider.train.online.buffer import Corrections, Stretch, batched, context_rows, joined, verified_rows
from outrider.train.online.student import counting, is_worse, judge, loss, steps_of
from tests.train.conftest import make_target

LAYERS = (1, 2, 3)
PLAN = AdaptPlan(every=120, steps=6, batch=4, length=40, context=8, lr=3e-3, unroll=2, background=False)


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    made = make_target(0)
    with torch.no_grad():  # the next token hangs on the last one mostly: something to learn in seconds
        for name, weight in made.model.named_parameters():
            weight.mul_(
                {"model.embed_tokens.weight": 5.0, "lm_head.weight": 4.0}.get(name, 0.3 if weight.ndim == 2 else 1)
            )
    return load_model(made.model)


@pytest.fixture(scope="module")
def drafter(target: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Hardly trained: any domain is a new one."""
    torch.manual_seed(3)
    shape = Eagle3Shape(32, 4, 2, 8, 48, LAYERS, 64)
    net = Eagle3Layer(shape, torch.arange(64))
    for weight in net.parameters():
        if weight.ndim == 2:
            torch.nn.init.normal_(weight, std=0.05)
    folder = tmp_path_factory.mktemp("drafter")
    card = DraftCard(target.name, target.fingerprint, LAYERS, {"steps": 1}, kind="eagle3", shape=shape.as_dict())
    write_drafter(folder, packed(net.tensors(), False), card)
    return folder


def engine_of(target: LoadedModel, drafter: Path, **options) -> Outrider:
    settings = {"drafter": str(drafter), "controller": "fixed", "budget": 6, "depth": 3, "verifier": "invariant"}
    return Outrider(target, "eagle3", settings | options, strict=True)


def stream(engine: Outrider, count: int, first: int = 0, temperature: float = 0.7) -> list:
    """Requests one after another; each its own seed."""
    prompts = [[1, 3 + i % 50, 9 + i % 7] for i in range(first, first + count)]
    return [
        engine.generate([prompt], max_new_tokens=48, temperature=temperature, seed=first + i)[0]
        for i, prompt in enumerate(prompts)
    ]


def accepted(results: list) -> float:
    return sum(r.stats.new_tokens for r in results) / sum(r.stats.steps for r in results)


@pytest.fixture(scope="module")
def plain(target) -> list:
    """What the target says by itself."""
    return stream(Outrider(target, "plain", strict=True), 24)


@pytest.fixture(scope="module")
def frozen(target, drafter) -> list:
    """The same texts with a drafter that does not learn."""
    return stream(engine_of(target, drafter), 24)


@pytest.mark.parametrize("background", [False, True])
def test_acceptance_rises_while_it_runs_and_the_text_stays_the_targets(
    target, drafter, plain, frozen, background: bool
) -> None:
    engine = engine_of(target, drafter)
    with adapt(engine, replace(PLAN, background=background)) as learner:
        results = stream(engine, 24)
        assert "taken" in [update.outcome for update in learner.updates]
    assert [r.token_ids for r in results] == [r.token_ids for r in plain]
    assert accepted(results[-8:]) > accepted(results[:6]) + 0.2
    assert accepted(results[-8:]) > accepted(frozen[-8:]) + 0.2
    after = stream(engine, 6, first=24)  # what was learnt stays
    assert accepted(after) > accepted(frozen) + 0.2


def test_greedy_text_and_coupled_sampling_with_adaptation_on(target, drafter) -> None:
    plain = stream(Outrider(target, "plain", strict=True), 8, temperature=0.0)
    with adapt(engine := engine_of(target, drafter), PLAN) as learner:
        assert [r.token_ids for r in stream(engine, 8, temperature=0.0)] == [r.token_ids for r in plain]
        assert learner.updates
    with adapt(engine := engine_of(target, drafter, verifier="recursive"), PLAN) as learner:
        results = stream(engine, 8)
        assert learner.updates and all(r.stats.new_tokens == len(r.token_ids) for r in results)


def test_without_a_learning_rate_nothing_is_ever_taken(target, drafter) -> None:
    with adapt(engine := engine_of(target, drafter), replace(PLAN, lr=0.0)) as learner:
        before = {name: weight.clone() for name, weight in learner.source.net.named_parameters()}
        stream(engine, 12)
        assert {update.outcome for update in learner.updates} == {"refused"}
        assert all(torch.equal(before[name], weight) for name, weight in learner.source.net.named_parameters())


def test_a_poisoned_update_is_rolled_back(target, drafter) -> None:
    with adapt(engine := engine_of(target, drafter), PLAN) as learner:
        stream(engine, 12)
        good = learner.source.net
        bad = student.twin(good, torch.float32)
        bad.lm_head.weight.copy_(bad.lm_head.weight.roll(7, 0))  # says another token, and is sure of it
        learner.source._offer(bad, good)
        poisoned = stream(engine, 3, first=12)
        assert accepted(poisoned) < 1.15
        stream(engine, 6, first=15)
        assert "rolled back" in [update.outcome for update in learner.updates]
        assert learner.source.net is not bad
        assert accepted(stream(engine, 6, first=21)) > accepted(poisoned) + 0.25


def test_an_update_that_does_not_help_unseen_text_is_refused(target, drafter, monkeypatch) -> None:
    def worse(self, embed, newest, older, noise):
        made = student.twin(self.net, torch.float32)
        made.lm_head.weight.copy_(made.lm_head.weight.roll(7, 0))
        return made

    with adapt(engine := engine_of(target, drafter), PLAN) as learner:
        stream(engine, 20)
        live = learner.source.net
        monkeypatch.setattr(student.Student, "learn", worse)
        seen = len(learner.updates)
        stream(engine, 8, first=20)
        assert {update.outcome for update in learner.updates[seen:]} <= {"refused", "rolled back"}
        assert learner.source.net is live or learner.source._before is None


def test_a_failing_update_leaves_the_drafter_and_the_text_alone(target, drafter, plain, monkeypatch, caplog) -> None:
    monkeypatch.setattr(student, "loss", lambda *_: 1 / 0)
    with adapt(engine := engine_of(target, drafter), PLAN) as learner:
        results = stream(engine, 8)
        assert learner.updates == [] and "adapting the drafter failed" in caplog.text
    assert [r.token_ids for r in results] == [r.token_ids for r in plain[:8]]


def test_the_buffer_stays_within_its_bytes(target, drafter) -> None:
    plan = replace(PLAN, bytes=60_000)
    with adapt(engine := engine_of(target, drafter), plan) as learner:
        stream(engine, 16)
        buffer = learner.source.buffer
        assert buffer.added > len(buffer) > 1 and buffer.nbytes <= 60_000
        assert buffer.nbytes == sum(rows.nbytes for rows in buffer.snapshot())
        assert learner.updates


def test_oldest_corrections_leave_first_and_giants_never_enter() -> None:
    small = context_rows(torch.arange(4), torch.zeros(4, 6), 3)
    buffer = Corrections(3 * small.nbytes)
    for _ in range(5):
        buffer.add(small)
    assert len(buffer) == 3 and buffer.snapshot(4) and len(buffer.snapshot(3)) == 2 and not buffer.snapshot(5)
    buffer.add(context_rows(torch.arange(400), torch.zeros(400, 6), 3))
    assert len(buffer) == 3


def test_the_thread_ends_with_the_adaptation_and_the_source_is_as_before(target, drafter) -> None:
    engine = engine_of(target, drafter)
    source = engine.recipe("eagle3").drafter.source
    with adapt(engine, replace(PLAN, background=True)):
        stream(engine, 8)
        assert engine.recipe("eagle3").drafter.source is not source
    assert not [t for t in threading.enumerate() if t.name == "outrider-adapt"]
    assert engine.recipe("eagle3").drafter.source is source


def test_what_was_learnt_can_be_saved_and_used_again(target, drafter, frozen, tmp_path) -> None:
    with adapt(engine := engine_of(target, drafter), PLAN) as learner:
        written = sum(r.stats.new_tokens for r in stream(engine, 12))
        learner.save(tmp_path / "learnt")
        with pytest.raises(InputError, match="another folder"):
            learner.save(drafter)
    card = read_card(tmp_path / "learnt")
    assert card.recipe["steps"] == 1 and card.recipe["adapted"]["rows"] == written
    assert accepted(stream(engine_of(target, tmp_path / "learnt"), 8)) > accepted(frozen[:8])


def test_methods_without_a_head_are_refused(target) -> None:
    with pytest.raises(InputError, match="no EAGLE-3 head"), adapt(Outrider(target, "plain"), method="plain"):
        pass


def rows_of(target: LoadedModel, text: list[int], weights: list[float], top: int = 64) -> Stretch:
    out = target.model(torch.tensor([text]), output_hidden_states=True)
    features = torch.cat([out.hidden_states[layer] for layer in LAYERS], -1)[0]
    return verified_rows(torch.tensor(text), features, out.logits[0], torch.arange(64), torch.tensor(weights), top)


def test_the_loss_is_the_weighted_kl_of_the_columns_before_the_errors(target, drafter) -> None:
    """Column u, which reads features u and token u + 1, answers for what row u + 1 said; no other row counts."""
    net, embed = load_eagle3(drafter, target), target.model.get_input_embeddings()
    text = [5, 9, 30, 2, 41, 7, 7, 12]
    weights = [0.0, 0.0, 0.0, 1.0, 0.0, 0.5, 0.0, 0.0]
    batch = batched([rows_of(target, text, weights)])
    plan = replace(PLAN, unroll=1, top=64)
    p = target.model(torch.tensor([text])).logits[0]
    q = next(iter(steps_of(net, embed, batch, 1)))[0]
    expected = (LOSSES["kl"](p[3:4], q[2:3]) + 0.5 * LOSSES["kl"](p[5:6], q[4:5])) / 1.5
    assert float(loss(net, embed, batch, plan)) == pytest.approx(float(expected), rel=2e-2)  # features are halved
    assert counting(batch, 0)[0].tolist() == [0, 0, 1, 0, 0.5, 0, 0, 0] and counting(batch, 3)[0, 2] == 0


def test_tokens_that_are_not_kept_count_as_one(target, drafter) -> None:
    """The KL between both distributions over the six likeliest tokens and all the others together."""
    net, embed = load_eagle3(drafter, target), target.model.get_input_embeddings()
    batch = batched([rows_of(target, [5, 9, 30], [0.0, 1.0, 0.0], top=6)])
    p = target.model(torch.tensor([[5, 9, 30]])).logits[0, 1].softmax(-1)
    q = next(iter(steps_of(net, embed, batch, 1)))[0, 0].exp()
    kept = p.topk(6).indices
    p, q = (torch.cat([probs[kept], 1 - probs[kept].sum(0, keepdim=True)]) for probs in (p, q))
    expected = float((p * (p / q).log()).sum())
    assert p[-1] > 0.05  # something is left
    assert float(loss(net, embed, batch, replace(PLAN, unroll=1))) == pytest.approx(expected, rel=1e-2)


def test_a_target_in_half_precision_is_learnt_from_too(target, drafter) -> None:
    from copy import deepcopy

    half = load_model(deepcopy(target.model).to(torch.bfloat16))
    engine = engine_of(replace(half, fingerprint=target.fingerprint), drafter)
    with adapt(engine, PLAN) as learner:
        stream(engine, 8)
        assert learner.updates and {w.dtype for w in learner.source.net.parameters()} == {torch.bfloat16}


def test_sixty_four_tokens_and_the_rest_lose_less_than_a_percent(target, drafter) -> None:
    net, embed = load_eagle3(drafter, target), target.model.get_input_embeddings()
    text = list(range(3, 35))
    values = [
        float(loss(net, embed, batched([rows_of(target, text, [1.0] * 32, top)]), PLAN)) for top in (64, 48)
    ]  # fmt: skip
    assert values[1] == pytest.approx(values[0], rel=1e-2)


def test_worse_is_what_chance_does_not_explain() -> None:
    before = torch.linspace(0, 1, 100, dtype=torch.float64)
    noise = torch.randn(100, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    noise = (noise - noise.mean()) / noise.std()
    assert not is_worse(before, before) and not is_worse(before + 0.1, before)
    assert not is_worse(before + noise - 0.09, before) and is_worse(before + noise - 0.11, before)


def test_filling_up_a_batch_changes_nothing(target, drafter) -> None:
    net, embed = load_eagle3(drafter, target), target.model.get_input_embeddings()
    short, long = rows_of(target, [5, 6, 7, 8], [1.0] * 4), rows_of(target, list(range(3, 20)), [1.0] * 17)
    alone, other, both = (judge(net, embed, rows, PLAN) for rows in ([short], [long], [short, long]))
    assert (len(alone), len(other)) == (3 + 2, 16 + 15)  # of two unrolled steps
    assert both.sort().values.tolist() == pytest.approx(torch.cat([alone, other]).sort().values.tolist(), abs=1e-5)
    assert len(joined([short, long])) == 21


def test_the_surface_names_what_it_holds(target, drafter) -> None:
    with adapt(engine_of(target, drafter)) as learner:
        assert isinstance(learner, Adaptation) and learner.updates == []
    with pytest.raises(InputError, match="context < length"), adapt(
        engine_of(target, drafter), AdaptPlan(context=200)
    ):  # fmt: skip
        pass


def test_updates_take_their_share_of_the_time_and_no_more(target, drafter, monkeypatch) -> None:
    """Two updates of which each takes ten seconds, at a fifth of the time: forty seconds lie between them."""
    now = [0.0]
    begun: list[float] = []

    def learn(self, fresh) -> None:
        begun.append(now[0])
        now[0] += 10.0

    monkeypatch.setattr("outrider.train.online.adapt.Adapting._learn", learn)
    with adapt(engine := engine_of(target, drafter), replace(PLAN, background=True, share=0.2, every=20)) as learner:
        learner.source.clock = lambda: now[0]
        for first in range(30):
            stream(engine, 1, first=first)
            if (thread := learner.source._thread) is not None:
                thread.join()
            now[0] += 5.0
    assert len(begun) > 2 and min(b - a for a, b in pairwise(begun)) >= 50.0


def test_a_mixture_learns_by_its_head_and_goes_on_from_what_was_kept(target, drafter, frozen, tmp_path) -> None:
    options = {"drafter": str(drafter), "parts": "suffix,eagle3", "budget": 6, "size": "budget"}
    engine = Outrider(target, "mix", options, strict=True)
    learner = begin(engine, PLAN, "mix")
    assert not learner.resume(tmp_path / "learnt")
    kept: list[Path] = []
    learner.source.changed = lambda: kept.append(learner.save(tmp_path / "learnt"))
    stream(engine, 12)
    learner.close()
    assert kept and learner.source.outcomes["taken"] and learner.drafter.source is learner.source.inner
    again = engine_of(target, drafter)
    learner = begin(again, replace(PLAN, lr=0.0))
    assert learner.resume(tmp_path / "learnt")
    assert accepted(stream(again, 8)) > accepted(frozen[:8])
    learner.close()
