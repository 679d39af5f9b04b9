"""The commands that make and judge a drafter, end to end on a small model folder; and the method that uses it."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from outrider.api import Outrider
from outrider.cli import app
from outrider.core.errors import InputError
from outrider.models import LoadedModel, load_model
from outrider.models.drafts import read_card, shipped_draft
from outrider.models.kept import drafters_folder, find_drafter
from outrider.train import loop
from outrider.train.kinds.registry import KINDS
from outrider.train.loop import LoopPlan
from outrider.train.losses import LOSSES
from outrider.train.text.selfdata import SelfData


def run(*command: str) -> dict:
    result = CliRunner().invoke(app, ["train", *command, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def refused(*command: str) -> str:
    result = CliRunner().invoke(app, ["train", *command])
    assert result.exit_code == 2 and result.output.startswith("error: "), result.output
    return result.output


@pytest.fixture(scope="module")
def model(four_layers: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    four_layers.model.save_pretrained(folder)
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    return folder


def test_data_run_and_eval_from_nothing_but_a_model(model: Path, tmp_path: Path) -> None:
    text, drafter, prompts = tmp_path / "text", tmp_path / "drafter", tmp_path / "prompts.jsonl"
    common = ("--model", str(model), "--device", "cpu")
    written = run("data", *common, "--tokens", "3k", "--length", "32", "--shard", "64", "--out", str(text))
    assert written["tokens"] == 32 * written["sequences"] and written["sequences"] + written["repeated"] == 128
    sizes = "--vocab 40 --unroll 2 --steps 4 --batch 4 --layers 0,1,2".split()
    trained = run("run", *common, "--data", str(text), "--out", str(drafter), *sizes)
    assert trained["kind"] == "eagle3" and [point["step"] for point in trained["curve"]] == [0, 4]
    assert len(trained["curve"][-1]["depths"]) == 2 and read_card(drafter).layers == (0, 1, 2)
    more = run("run", *common, "--data", str(text), "--from", str(drafter), "--out", str(tmp_path / "more"), *sizes)
    assert more["curve"][0]["greedy"] == pytest.approx(trained["curve"][-1]["greedy"], abs=0.02)
    prompts.write_text('{"prompt": "w3 w4 w5", "category": "qa"}\n{"prompt": "w9 w8", "category": "math"}\n')
    judged = run("eval", *common, "--drafter", str(drafter), "--prompts", str(prompts), "--budgets", "4",
                 "--temperatures", "0,1", "--max-new-tokens", "8")  # fmt: skip
    assert [(row["temperature"], row["group"]) for row in judged["rows"]] == [
        (t, group) for t in (0.0, 1.0) for group in ("qa", "chat", "all")
    ]  # math is one of the chat categories
    for row in judged["rows"]:
        assert row["tokens"] <= 8 * row["prompts"] and 1 <= row["accepted"] <= 5
    whole = CliRunner().invoke(app, ["train", "eval", *common, "--drafter", str(drafter), "--prompts", str(prompts)])
    assert whole.exit_code == 0 and "16 nodes, T=0" in whole.output and "all" in whole.output


def test_a_killed_run_goes_on_from_the_last_checkpoint_that_was_asked_for(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common, text = ("--model", str(model), "--device", "cpu"), str(tmp_path / "text")
    run("data", *common, "--tokens", "2k", "--length", "32", "--shard", "64", "--out", text)
    sizes = "--vocab 40 --unroll 1 --steps 12 --batch 2 --layers 0,1,2 --checkpoint-every 4".split()
    command = ("run", *common, "--data", text, *sizes, "--out")
    whole = run(*command, str(tmp_path / "whole"))
    assert [point["step"] for point in whole["curve"]] == [0, 4, 8, 12]
    steps: list[int] = []

    def killed(step: int) -> None:
        steps.append(step)
        if len(steps) == 11:
            raise KeyboardInterrupt

    batch_of = loop.batch_of
    monkeypatch.setattr(loop, "batch_of", lambda data, plan, step: (killed(step), batch_of(data, plan, step))[1])
    cut = CliRunner().invoke(app, ["train", *command, str(tmp_path / "cut")])
    assert cut.exit_code == 130 and (tmp_path / "cut" / loop.CHECKPOINT).exists()
    pasted = shlex.join(["outrider", "train", *command, str(tmp_path / "cut")])
    assert cut.stderr == f"interrupted; go on with: {pasted}\n"
    again = run(*command, str(tmp_path / "cut"))
    assert steps == [*range(11), *range(8, 12)]
    assert [{**point, "seconds": 0} for point in again["curve"][1:]] == [
        {**point, "seconds": 0} for point in whole["curve"][1:]
    ]
    assert "use 1 or more updates" in refused(*command, str(tmp_path / "x"), "--checkpoint-every", "0")


def test_what_was_trained_is_kept_for_its_target_also_without_a_folder(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common, text = ("--model", str(model), "--device", "cpu"), str(tmp_path / "text")
    run("data", *common, "--tokens", "2k", "--length", "32", "--shard", "64", "--out", text)
    sizes = "--vocab 40 --unroll 1 --steps 4 --batch 2 --layers 0,1,2 --checkpoint-every 2".split()
    command, target = ("run", *common, "--data", text, *sizes), load_model(model, device="cpu")
    assert "name a folder with --out" in refused(*command, "--no-keep")
    assert run(*command, "--out", str(tmp_path / "apart"), "--no-keep")["kept"] is None
    assert find_drafter(target, "eagle3") is None
    steps: list[int] = []

    def killed(step: int) -> None:
        steps.append(step)
        if len(steps) == 4:
            raise KeyboardInterrupt

    batch_of = loop.batch_of
    monkeypatch.setattr(loop, "batch_of", lambda data, plan, step: (killed(step), batch_of(data, plan, step))[1])
    assert CliRunner().invoke(app, ["train", *command]).exit_code == 130
    made = run(*command)
    assert steps == [0, 1, 2, 3, 2, 3] and made["folder"] is None
    kept = find_drafter(target, "eagle3")
    assert kept is not None and kept.name == made["kept"] and not any((drafters_folder().parent / "training").iterdir())
    card = read_card(kept)
    assert card.recipe["data"]["tokens"] > 1000 and card.origin == "outrider train run"
    weights = [load_file(folder / "model.safetensors") for folder in (kept, tmp_path / "apart")]
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[1])


def test_a_drafter_answers_the_texts_users_and_is_trained_on_it(model: Path, tmp_path: Path) -> None:
    text, drafter, written = (str(tmp_path / name) for name in ("text", "drafter", "written"))
    common = ("--model", str(model), "--device", "cpu")
    run("data", *common, "--tokens", "2k", "--length", "32", "--shard", "64", "--out", text)
    sizes = "--vocab 40 --unroll 2 --steps 2 --batch 4 --layers 0,1,2".split()
    run("run", *common, "--data", text, "--out", drafter, *sizes)
    write = ("on-policy", *common, "--drafter", drafter, "--data", text, "--out", written)
    for _ in range(2):  # the second time all of it is there
        made = run(*write, "--share", "0.25", "--sequences", "32", "--temperatures", "0,1")
        assert (made["sequences"], made["rewritten"], made["tokens"]) == (32, 8, 32 * 32)
        assert made["own"] == 8 * 31 and made["answers"] == 32 * 31
    more = run("run", *common, "--data", written, "--from", drafter, "--out", str(tmp_path / "more"), *sizes,
               "-o", "held_out=8")  # fmt: skip
    assert [point["step"] for point in more["curve"]] == [0, 2]
    shown = CliRunner().invoke(app, ["train", *write, "--share", "0.25", "--sequences", "32", "--temperatures", "0,1"])
    assert shown.exit_code == 0 and "248 of 992 tokens of answers" in shown.output.replace("\n", " ")
    assert "a share of 2" in refused(*write, "--share", "2")
    assert "share 0.25 (asked: 0.5)" in refused(*write, "--share", "0.5")
    assert "above zero" in refused(*write, "--batch", "0")


@pytest.mark.parametrize("kind", ["eagle2", "fspad", "medusa", "hydra"])
def test_other_kinds_take_the_same_commands(kind: str, model: Path, tmp_path: Path) -> None:
    text, drafter, prompts = tmp_path / "text", tmp_path / "drafter", tmp_path / "prompts.jsonl"
    common = ("--model", str(model), "--device", "cpu")
    run("data", *common, "--tokens", "2k", "--length", "32", "--shard", "64", "--out", str(text))
    trained = run("run", *common, "--kind", kind, "--data", str(text), "--out", str(drafter), "--steps", "2",
                  "--batch", "4", "--loss", "tvdpp", "-o", "decay=0.7")  # fmt: skip
    card = read_card(drafter)
    assert trained["kind"] == card.kind == kind and (card.recipe["loss"], card.recipe["decay"]) == ("tvdpp", 0.7)
    prompts.write_text('{"prompt": "w3 w4 w5", "category": "qa"}\n')
    judged = run("eval", *common, "--drafter", str(drafter), "--prompts", str(prompts), "--budgets", "4",
                 "--temperatures", "0,1", "--max-new-tokens", "8")  # fmt: skip
    assert [row["temperature"] for row in judged["rows"]] == [0.0, 1.0]
    assert all(row["tokens"] <= 8 and 1 <= row["accepted"] <= 5 for row in judged["rows"])


def test_wrong_options_are_refused_in_one_line(model: Path, tmp_path: Path) -> None:
    common = ("--model", str(model), "--device", "cpu", "--out", str(tmp_path / "out"))
    assert "known kinds: eagle3" in refused("run", *common, "--data", str(tmp_path), "--kind", "eagle9")
    assert "outrider train data" in refused("run", *common, "--data", str(tmp_path))
    assert "unroll is 0; use 1 or more" in refused("run", *common, "--data", str(tmp_path), "--unroll", "0")
    heads = ("run", *common, "--data", str(tmp_path), "--kind", "medusa")
    assert "kind medusa has no setting 'unroll' (a setting of eagle3, eagle2" in refused(*heads, "--unroll", "2")
    assert "setting heads is 0; use 1 or more" in refused(*heads, "--option", "heads=0")
    assert "write it as name=value" in refused(*heads, "--option", "heads")
    assert "above zero" in refused("data", *common, "--shard", "0")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "w3"}\n')
    judge = ("eval", "--model", str(model), "--drafter", str(tmp_path), "--prompts", str(prompts))
    assert "--budgets a" in refused(*judge, "--budgets", "a")
    assert "no draft here" in refused(*judge)


def test_help_lists_every_loss_and_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    help = CliRunner().invoke(app, ["train", "run", "--help"]).output
    words = set(help.replace(",", " ").replace(".", " ").split())
    assert set(LOSSES) <= words and set(KINDS) <= words
    table = CliRunner().invoke(app, ["train", "kinds"])
    assert table.exit_code == 0 and "feature_weight" in table.output
    listed = run("kinds")["rows"]
    assert [row["kind"] for row in listed] == list(KINDS) and listed[0]["settings"]["unroll"]["default"] == 6


@pytest.mark.parametrize("kind", KINDS)
def test_run_takes_the_defaults_that_kinds_lists(
    kind: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[LoopPlan] = []

    def train_drafter(kind: str, target: LoadedModel, text: SelfData, plan: LoopPlan, *_: Any, **__: Any) -> None:
        plans.append(plan)
        raise InputError("enough")

    monkeypatch.setattr("outrider.cli.train.commands.train_drafter", train_drafter)
    text = SelfData(torch.zeros(2, 4, dtype=torch.int64), torch.zeros(2, 4, dtype=torch.uint8))
    monkeypatch.setattr("outrider.train.text.selfdata.read_data", lambda *_: text)
    (tmp_path / "shard-0.safetensors").touch()
    more = ("--model", str(model), "--device", "cpu", "--data", str(tmp_path), "--out", str(tmp_path / "out"))
    assert "enough" in refused("run", "--kind", kind, *more)
    listed = next(row["settings"] for row in run("kinds")["rows"] if row["kind"] == kind)
    assert json.loads(json.dumps(asdict(plans[0]))) == {name: setting["default"] for name, setting in listed.items()}


def test_folders_that_are_none_are_refused_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.models.load_model", lambda *_, **__: pytest.fail("a model was loaded"))
    empty, out, prompts = str(tmp_path), str(tmp_path / "out"), tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "w3"}\n')
    for command in (("run",), ("trim", "--drafter", empty), ("replay", "--drafter", empty),
                    ("on-policy", "--drafter", empty)):  # fmt: skip
        assert "no text here" in refused(*command, "--data", empty, "--out", out)
    assert "no draft here" in refused("eval", "--drafter", empty, "--prompts", str(prompts))
    (tmp_path / "shard-0.safetensors").touch()
    assert "no draft here" in refused("run", "--data", empty, "--from", empty, "--out", out)


def test_the_shipped_drafter_is_small_belongs_to_the_embedded_model_and_is_accepted(smollm2: LoadedModel) -> None:
    folder = shipped_draft(smollm2, "eagle3")
    assert folder is not None and sum(file.stat().st_size for file in folder.iterdir()) < 40e6
    assert read_card(folder).kind == "eagle3" and "Apache-2.0" in read_card(folder).licence
    draft = shipped_draft(smollm2)
    assert draft is not None and read_card(draft).kind == "draft-model"
    engine = Outrider(smollm2, "plain", strict=True)
    prompt = engine.encode_chat([{"role": "user", "content": "What is 12 times 7? Explain it step by step."}])
    recipe = engine.recipe("eagle3", {"budget": 16, "controller": "fixed"})
    results = {
        name: engine.engine.submit(prompt, engine._params(None, {"max_new_tokens": 32}), each).result()
        for name, each in (("plain", engine.recipe("plain")), ("eagle3", recipe))
    }
    assert results["eagle3"].token_ids == results["plain"].token_ids
    assert results["eagle3"].stats.mean_accepted > 1.8
