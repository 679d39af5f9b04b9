"""`outrider drafters`: what is listed, shown, added and removed, and what is said when that cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.export import export
from outrider.models import load_model
from outrider.models.drafts import DraftCard, packed, write_drafter
from outrider.models.kept import kept
from outrider.models.networks.eagle3 import Eagle3Layer, Eagle3Shape


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("models") / "tiny"
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture
def drafter(model: Path, tmp_path: Path) -> Path:
    target = load_model(model, device="cpu")
    shape = Eagle3Shape(32, 4, 2, 8, 48, (1, 2, 3), 20)
    net = Eagle3Layer(shape, torch.arange(20) * 3)
    recipe = {"steps": 7, "data": {"tokens": 1234}}
    card = DraftCard(target.name, target.fingerprint, (1, 2, 3), recipe, {"held-out": {"greedy": 0.5}}, "MIT", "eagle3",
                     shape.as_dict())  # fmt: skip
    write_drafter(tmp_path / "drafter", packed(net.tensors(), False), card)
    return tmp_path / "drafter"


def said(run: Any, *args: str) -> Any:
    done = run("drafters", *args, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    return found.get("rows", found)


def test_a_published_drafter_is_added_listed_shown_and_removed(run, model, drafter, tmp_path) -> None:
    export(drafter, load_model(model, device="cpu"), "vllm", tmp_path / "published")
    done = run("drafters", "add", str(tmp_path / "published"), "--model", str(model))
    assert done.exit_code == 0 and "used by default from now on" in done.stdout, done.output
    drafter = kept()[0]
    listed = said(run, "list", "--model", "tiny")
    assert [(row["name"], row["kind"], row["from"], row["default"]) for row in listed] == [
        (drafter.name, "eagle3", str(tmp_path / "published"), True)
    ]
    assert any(row["shipped"] and row["target"] == "smollm2" for row in said(run, "list"))
    table = run("drafters", "list").stdout
    assert drafter.name in table and "comes with the package" in " ".join(table.split())
    shown = said(run, "show", drafter.name[:9])
    assert shown["parameters"] == drafter.parameters and shown["card"]["shape"]["vocab"] == 20
    page = run("drafters", "show", drafter.name).stdout
    assert "training data" in page and "not known" in page and "draft_vocab_size 20" in " ".join(page.split())
    kept_still = run("drafters", "remove", drafter.name, input="n\n")
    assert kept_still.exit_code == 0 and "kept" in kept_still.stdout and len(kept()) == 1
    nobody = run("drafters", "remove", drafter.name, input="")
    assert nobody.exit_code == 2 and "--yes" in nobody.output and len(kept()) == 1
    assert run("drafters", "remove", drafter.name, input="y\n").exit_code == 0 and kept() == []


def test_a_drafter_of_ours_is_added_to_the_target_it_names(run, model, drafter) -> None:
    made = said(run, "add", str(drafter), "--model", str(model))
    assert made["kind"] == "eagle3" and made["from"] == str(drafter)
    page = run("drafters", "show", made["name"]).stdout
    assert "tokens 1234" in page and "greedy 0.5" in page and "MIT" in page and "steps 7" in page
    assert said(run, "remove", made["name"], "--yes")["deleted"] and kept() == []


def test_the_newest_of_a_kind_is_the_default(run, model, drafter, tmp_path) -> None:
    target = load_model(model, device="cpu")
    export(drafter, target, "vllm", tmp_path / "published", dtype=torch.bfloat16)
    first = said(run, "add", str(drafter), "--model", str(model))["name"]
    second = said(run, "add", str(tmp_path / "published"), "--model", str(model))["name"]
    assert [(row["name"], row["default"]) for row in said(run, "list", "-m", "tiny")] == [
        (second, True),
        (first, False),
    ]


def test_what_cannot_be_done_is_said_in_one_line(run, model, drafter, tmp_path) -> None:
    def refused(*args: str) -> str:
        done = run("drafters", *args)
        assert done.exit_code == 2 and done.output.startswith("error: ") and done.output.count("\n") == 1, done.output
        return done.output

    export(drafter, load_model(model, device="cpu"), "vllm", tmp_path / "published")
    assert "name it with --model" in refused("add", str(tmp_path / "published"))
    assert "give a drafter's folder or a hub id" in refused("add", str(tmp_path / "nothing" / "here"))
    assert "neither drafter.json nor config.json" in refused("add", str(tmp_path), "--model", str(model))
    assert "that of 'smollm2'" in refused("add", str(tmp_path / "published"), "--model", "smollm2")
    assert "trained for 'tiny'" in refused("add", str(drafter), "--model", "smollm2")
    assert "there are: " in refused("show", "nothing")
    assert "`outrider drafters list`" in refused("remove", "nothing", "--yes")
    assert "comes with the package and stays" in refused("remove", "smollm2-eagle3", "--yes")
    assert kept() == []
