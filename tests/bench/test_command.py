"""`outrider compare` from the command line, on a model of two thin layers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from outrider import methods
from outrider.cli import app
from outrider.control.fixed import Fixed
from outrider.core.protocols import Recipe
from outrider.core.records import Budget
from outrider.draft.lookup.prompt_lookup import PromptLookup
from outrider.methods import Options
from outrider.verify.invariant import Invariant

FIGURES = {
    "tokens_per_s": float, "speedup": float, "mean_accepted": float, "efficiency": float, "acceptance_by_depth": list,
    "host_ms_per_step": float, "ttft_ms": float, "identical": bool, "new_tokens": int, "draft_share": float,
    "verify_share": float, "rest_share": float,
}  # fmt: skip


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    rows = [
        {"prompt": "the cat sat on the mat, the cat sat on the mat, the cat", "category": "rag"},
        {"turns": ["Hello there", "And then?"], "category": "writing", "id": "talk"},
        {"messages": [{"role": "user", "content": "Who are you?"}], "category": "rag"},
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def run(model: Path, prompts: Path, *more: str) -> Result:
    return CliRunner().invoke(
        app, ["compare", "--model", str(model), "--prompts", str(prompts), "--max-new-tokens", "8", *more]
    )


def test_json_has_every_promised_figure_overall_and_by_group(model_folder: Path, prompts: Path) -> None:
    outcome = run(model_folder, prompts, "--methods", "prompt-lookup,draft-model", "--json")
    assert outcome.exit_code == 0, outcome.output
    out = json.loads(outcome.stdout)
    assert [m["method"] for m in out["methods"]] == ["plain", "prompt-lookup", "draft-model"]
    for method in out["methods"]:
        for figures in (method, *method["groups"].values()):
            for name, kind in FIGURES.items():
                assert isinstance(figures[name], kind), name
            assert figures["efficiency"] == pytest.approx(figures["speedup"] / figures["mean_accepted"])
            assert figures["draft_share"] + figures["verify_share"] + figures["rest_share"] == pytest.approx(1.0)
        assert set(method["groups"]) == {"rag", "chat"}
        assert method["answers"] == 4 and method["identical"] is True
    assert out["complete"] is True and out["settings"]["prompts"] == "prompts.jsonl"
    assert str(model_folder) not in outcome.stdout and str(prompts.parent) not in outcome.stdout


def test_table_page_and_files(model_folder: Path, prompts: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    page, data = tmp_path / "page.html", tmp_path / "out.json"
    outcome = run(
        model_folder, prompts, "--methods", "wide=prompt-lookup", "-o", "wide.budget=3", "--limit", "1", "--batch", "2",
        "--rounds", "2", "--raw", "--temperature", "0.7", "--seed", "5", "--html", str(page), "--json", str(data),
    )  # fmt: skip
    assert outcome.exit_code == 0, outcome.output
    assert "wide" in outcome.stdout and "tokens/s" in outcome.stdout
    out = json.loads(data.read_text())
    wide = out["methods"][1]
    assert wide["recipe"] == "prompt-lookup" and wide["options"]["budget"] == 3 and wide["identical"] is True
    assert out["settings"]["groups"] == {"rag": 1, "chat": 1} and out["settings"]["seed"] == 5
    assert page.read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"prompt": "fine"}\n{"prompt": \n', "line 2 is not JSON"),
        (b'{"prompt": "\xff"}', "line 1 is not UTF-8"),
        (b'{"text": "x"}', "line 1 needs exactly one of prompt, turns and messages"),
        (b"", "holds no prompts"),
        (None, "no such file"),
    ],
)
def test_a_bad_prompt_file_is_one_line_and_status_2(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    if content is not None:
        path.write_bytes(content)
    outcome = run(Path("no-such-model"), path)  # refused before any model is looked for
    assert outcome.exit_code == 2
    assert message in outcome.stderr and outcome.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--methods", "nonsense"), "known methods"),
        (("--option", "budget=3"), "whose it is"),
        (("--rounds", "0"), "rounds is 0"),
        (("--limit", "0"), "limit of 0"),
        (("--samples", "2"), "one sample"),
        (("--temperature", "-1"), "temperature"),
        (("--html", "no/such/folder.html"), "does not exist"),
        (("--json", "no/such/folder.json"), "does not exist"),
    ],
)
def test_a_bad_option_is_refused_before_the_model_is_loaded(prompts: Path, more: tuple[str, ...], message: str) -> None:
    outcome = run(Path("no-such-model"), prompts, *more)
    assert outcome.exit_code == 2 and message in outcome.stderr and outcome.stderr.count("\n") == 1


@pytest.fixture
def interrupting() -> Iterator[str]:
    """Someone presses Ctrl-C in the middle of an answer."""
    steps = 0

    class Pressing(PromptLookup):
        def observe(self, slots: Sequence[int], records: Any) -> None:
            nonlocal steps
            steps += 1
            if steps > 20:  # 8 of the warm-up, 8 of the first prompt, then in the second
                raise KeyboardInterrupt

    info = methods.MethodInfo(
        "interrupting", "", "-", "test", True, "nothing", Options,
        lambda parts, options: Recipe("interrupting", Pressing(), Invariant(), Fixed(Budget(0, 0))),
    )  # fmt: skip
    methods.register(info)
    yield info.name
    methods.registry._METHODS.pop(info.name)


def test_ctrl_c_leaves_a_valid_partial_result_and_status_130(
    model_folder: Path, prompts: Path, tmp_path: Path, interrupting: str
) -> None:
    data = tmp_path / "out.json"
    more = ("--methods", interrupting, "--ignore-eos", "--json", str(data))
    outcome = run(model_folder, prompts, *more)
    assert outcome.exit_code == 130, outcome.output
    out = json.loads(data.read_text())
    assert out["complete"] is False and [unit["ids"] for unit in out["units"]] == [["1"]]
    assert out["methods"][1]["identical"] is True and "interrupted" in outcome.stdout


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", *arguments])


def test_a_bench_from_the_command_line_is_resumed_reported_and_compared(
    model_folder: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.bench.runner.bandwidth", lambda device: 1e9)
    monkeypatch.setattr("outrider.bench.runner.SETTLE_S", 0.0)
    monkeypatch.setattr("outrider.bench.steps.bandwidth", lambda device: 1e9)
    folder = tmp_path / "out"
    arguments = ["run", "--out", str(folder), "--model", str(model_folder), "--suite", str(prompts), "--systems",
                 "prompt-lookup,transformers:prompt-lookup,vllm", "--max-context", "400", "-n", "6",
                 "--device", "cpu"]  # fmt: skip
    monkeypatch.setattr("outrider.bench.environments.user_cache_path", lambda name: tmp_path)
    outcome = bench(*arguments, "--json", str(tmp_path / "a.json"))
    assert outcome.exit_code == 0, outcome.output
    out = json.loads((tmp_path / "a.json").read_text())
    assert out == json.loads((folder / "results.json").read_text())
    (section,) = out["sections"]
    rows = {row["method"]: row for row in section["methods"]}
    assert rows["prompt-lookup"]["identical"] is True and rows["transformers:prompt-lookup"]["identical"] is True
    assert rows["transformers"]["floor_share"] and rows["transformers"]["mean_accepted"] == pytest.approx(1.0)
    assert section["best_peer"] in ("transformers", "transformers:prompt-lookup")
    assert any(f["label"] == "vllm" and "outrider bench setup vllm" in f["error"] for f in section["failures"])
    assert "vllm failed" in outcome.stdout and "| plain |" in (folder / "report.md").read_text()
    before = (folder / "journal.jsonl").read_text().count('"kind": "run"')
    assert bench(*arguments).exit_code == 0
    assert (folder / "journal.jsonl").read_text().count('"kind": "run"') == before
    again = bench("report", str(folder), "--json")
    assert again.exit_code == 0 and json.loads(again.stdout)["sections"][0]["methods"] == section["methods"]
    same = bench("diff", str(tmp_path / "a.json"), str(folder / "results.json"))
    assert same.exit_code == 0 and "0 slower" in same.stdout
    assert str(model_folder) not in (folder / "results.json").read_text()


def test_step_costs_from_the_command_line(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.bench.steps.bandwidth", lambda device: 1e9)
    outcome = bench("steps", "--model", str(model_folder), "--rows", "1,4", "--batch", "1,2", "--context", "8,16",
                    "--repeats", "1", "--device", "cpu", "--json")  # fmt: skip
    assert outcome.exit_code == 0, outcome.output
    out = json.loads(outcome.stdout)
    assert [(s["batch"], s["context"], s["rows"]) for s in out["steps"]] == [
        (b, c, r) for b in (1, 2) for c in (8, 16) for r in (1, 4)
    ]
    assert all(s["seconds"] > 0 and s["floor_seconds"] > 0 for s in out["steps"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run", "--out", "x", "--systems", "nonsense"), "known systems"),
        (("run", "--out", "x", "--suite", "nonsense"), "known suites"),
        (("run", "--out", "x", "--rounds", "1"), "3 rounds or more"),
        (("run", "--out", "x", "--batch", "1,x"), "--batch 1,x"),
        (("run", "--out", "x", "--memory", "maybe"), "--memory maybe"),
        (("setup", "nonsense"), "known peers"),
        (("report", "no-such-folder"), "no journal"),
        (("diff", "no-such.json", "b.json"), "no such file"),
        (("steps", "--rows", "0"), "--rows 0"),
    ],
)
def test_a_bad_bench_command_is_refused_before_anything_runs(
    arguments: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = bench(*arguments)
    assert outcome.exit_code == 2 and message in outcome.stderr and not list(tmp_path.iterdir())
