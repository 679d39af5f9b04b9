"""Distillation: the draft comes closer to its target, a killed run repeats its steps, other targets are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from outrider.cli import app
from outrider.core.errors import InputError, UnknownName
from outrider.models import LoadedModel, load_model
from outrider.models.drafts import drafter_parameters, load_draft, new_draft, read_card
from outrider.models.kept import find_drafter
from outrider.train.kinds.distill import DistillPlan, DraftLearner, distill, measure, pick_layers, rows
from outrider.train.loop import CHECKPOINT, CURVE, Point, batch_of, schedule, split
from outrider.train.losses import LOSSES
from outrider.train.text.dialogue import ANSWER
from outrider.train.text.selfdata import SelfData

PLAN = DistillPlan(layers=(0, 3), steps=40, batch=8, lr=3e-3, held_out=16)


def test_training_lowers_the_loss_and_raises_acceptance(
    four_layers: LoadedModel, text: SelfData, tmp_path: Path
) -> None:
    before = {name: weight.clone() for name, weight in four_layers.model.named_parameters()}
    draft, curve = distill(four_layers, text, PLAN, tmp_path, measure_every=10)
    assert [point.step for point in curve] == [0, 10, 20, 30, 40]
    assert curve[-1].loss < 0.9 * curve[1].loss
    held_out, _ = split(text, 16)
    untrained = measure(four_layers.model, new_draft(four_layers, (0, 3)), held_out)
    trained = measure(four_layers.model, draft, held_out)
    assert trained[0] > untrained[0] + 0.05 and trained[1] > untrained[1] + 0.05
    assert (curve[0].greedy, curve[0].sampled) == untrained
    assert all(torch.equal(weight, before[name]) for name, weight in four_layers.model.named_parameters())
    assert [point["step"] for point in json.loads((tmp_path / CURVE).read_text())] == [0, 10, 20, 30, 40]


def test_the_saved_draft_gives_the_logits_of_the_trained_one(
    four_layers: LoadedModel, text: SelfData, tmp_path: Path
) -> None:
    draft, _ = distill(four_layers, text, PLAN, tmp_path, licence="Apache-2.0")
    card = read_card(tmp_path)
    assert card.layers == (0, 3) and card.fingerprint == four_layers.fingerprint and card.licence == "Apache-2.0"
    loaded = load_draft(tmp_path, four_layers)
    for name, weight in drafter_parameters(loaded).items():
        assert torch.equal(weight, drafter_parameters(draft)[name].half().float())
    row = text.tokens[:2].long()
    torch.testing.assert_close(loaded(row).logits, draft(row).logits, atol=0.02, rtol=0.02)


def test_a_killed_run_goes_on_with_the_same_steps(four_layers: LoadedModel, text: SelfData, tmp_path: Path) -> None:
    whole, _ = distill(four_layers, text, PLAN, tmp_path / "whole", measure_every=10)

    def kill(step: int, of: int, point: Point) -> None:
        if step == 27:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        distill(four_layers, text, PLAN, tmp_path / "cut", measure_every=10, save_every=0, on_progress=kill)
    assert (tmp_path / "cut" / CHECKPOINT).exists() and not (tmp_path / "cut" / "drafter.json").exists()
    steps: list[int] = []
    resumed, curve = distill(
        four_layers, text, PLAN, tmp_path / "cut", measure_every=10, on_progress=lambda step, *_: steps.append(step)
    )
    assert steps == list(range(21, 41))  # from the checkpoint after step 20
    assert [point.step for point in curve] == [0, 10, 20, 30, 40]
    for name, weight in drafter_parameters(whole).items():
        assert torch.equal(weight, drafter_parameters(resumed)[name]), name
    assert not (tmp_path / "cut" / CHECKPOINT).exists()


def test_a_checkpoint_of_another_target_or_plan_is_refused(
    four_layers: LoadedModel, another: LoadedModel, text: SelfData, tmp_path: Path
) -> None:
    def kill(step: int, of: int, point: Point) -> None:
        if step == 12:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        distill(four_layers, text, PLAN, tmp_path, measure_every=10, save_every=0, on_progress=kill)
    for target, plan in ((another, PLAN), (four_layers, DistillPlan(layers=(0, 3), steps=41))):
        with pytest.raises(InputError, match=r"is of a run with (target|steps) \S+ \(asked: \S+\)"):
            distill(target, text, plan, tmp_path)


def test_a_draft_of_another_target_is_refused(
    four_layers: LoadedModel, another: LoadedModel, text: SelfData, tmp_path: Path
) -> None:
    distill(four_layers, text, DistillPlan(layers=(0,), steps=1, batch=2, held_out=2), tmp_path)
    with pytest.raises(InputError, match="trained for"):
        load_draft(tmp_path, another)
    with pytest.raises(InputError, match="already holds a finished draft"):
        distill(four_layers, text, PLAN, tmp_path)


def test_every_sequence_comes_once_an_epoch(text: SelfData) -> None:
    plan = DistillPlan(layers=(0,), batch=8)
    numbered = SelfData(torch.arange(24)[:, None], torch.zeros(24, 1))
    seen = [batch_of(numbered, plan, step).tokens.flatten().tolist() for step in range(6)]
    for epoch in (seen[:3], seen[3:]):
        assert sorted(row for batch in epoch for row in batch) == list(range(24))
    assert seen[:3] != seen[3:]


def test_a_token_that_is_no_answer_teaches_nothing(four_layers: LoadedModel, text: SelfData) -> None:
    draft = new_draft(four_layers, (0,))
    weights = drafter_parameters(draft)
    for weight in weights.values():
        weight.requires_grad_(True)
    silent = SelfData(text.tokens[:4], torch.zeros_like(text.roles[:4]))
    loss = DraftLearner(four_layers.model, draft, LOSSES["mix"]).backward(silent)
    assert float(loss) == 0 and all(w.grad is not None and not w.grad.any() for w in weights.values())


def test_the_schedule_rises_then_falls() -> None:
    plan = DistillPlan(layers=(0,), steps=100, warmup=0.1)
    rates = [schedule(step, plan) for step in range(100)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == 1.0 == max(rates)
    assert rates[9:] == sorted(rates[9:], reverse=True) and 0.05 <= rates[-1] < 0.06


def test_layers_by_count_or_by_number() -> None:
    assert pick_layers("5", 30) == (0, 1, 2, 28, 29)
    assert pick_layers("1", 30) == (0,)
    assert pick_layers("0,7,29", 30) == (0, 7, 29)
    for wrong in ("0", "31", "3,30", "-1", "five", ""):
        with pytest.raises(InputError):
            pick_layers(wrong, 30)


def test_bad_plans_are_refused(four_layers: LoadedModel, text: SelfData, tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match="known losses: kl, rkl, jsd, tvd, tvdpp, nla, ce, mix"):
        distill(four_layers, text, DistillPlan(layers=(0,), loss="l2"), tmp_path)
    with pytest.raises(InputError, match="too few"):
        distill(four_layers, text, DistillPlan(layers=(0,), held_out=10_000), tmp_path)


def test_the_command_trains_a_model_folder(four_layers: LoadedModel, tmp_path: Path) -> None:
    four_layers.model.save_pretrained(tmp_path / "model")
    folder = tmp_path / "draft"
    sizes = "--layers 2 --tokens 2k --length 32 --shard 64 --steps 2 --batch 2 --device cpu".split()
    command = ["train", "distill", "--model", str(tmp_path / "model"), *sizes, "--out", str(folder)]
    result = CliRunner().invoke(app, [*command, "--json"])
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert said["layers"] == [0, 3] and [point["step"] for point in said["curve"]] == [0, 2]
    assert read_card(folder).recipe["data"]["length"] == 32
    kept = find_drafter(load_model(tmp_path / "model", device="cpu"))
    assert kept is not None and kept.name == said["kept"]
    other = [*command, "--out", str(tmp_path / "other"), "--data", str(folder / "data"), "--length", "16"]
    result = CliRunner().invoke(app, other)
    assert result.exit_code == 0 and "length 32 (asked: 16)" in result.output, result.output
    assert read_card(tmp_path / "other").recipe["data"]["length"] == 32
    for bad in (["--tokens", "many"], ["--layers", "9"], ["--lr", "0"], []):  # the last: the draft is there already
        again = CliRunner().invoke(app, [*command, *bad])
        assert again.exit_code == 2 and again.output.startswith("error: "), again.output


def test_a_row_counts_where_the_next_token_is_an_answers(four_layers: LoadedModel) -> None:
    part = SelfData(torch.tensor([[1, 5, 6, 7, 8]]), torch.tensor([[0, 1, 2, 2, 0]], dtype=torch.uint8))
    p, q, wanted = rows(four_layers.model, new_draft(four_layers, (0,)), part)
    assert wanted.tolist() == [False, True, True, False, False]
    torch.testing.assert_close(p, four_layers.model(part.tokens).logits[0])
    assert q.shape == p.shape


def test_a_sequence_that_begins_with_an_answer_does_not_lower_acceptance(four_layers: LoadedModel) -> None:
    every = SelfData(torch.tensor([[5, 6, 7, 8], [9, 3, 4, 11]]), torch.full((2, 4), ANSWER, dtype=torch.uint8))
    greedy, drawn = measure(four_layers.model, four_layers.model, every)  # of itself
    assert greedy == 1 and drawn == pytest.approx(1)
