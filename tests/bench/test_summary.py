"""Reports of a bench are made from its results alone: complete, escaped, self-contained; and two results compared."""

from __future__ import annotations

import copy
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from outrider.bench import diff, steps, summary
from outrider.bench.journal import Journal
from outrider.bench.runner import Bench, results, run
from outrider.bench.suites import Suite
from outrider.core.errors import InputError
from outrider.core.params import SamplingParams
from outrider.store.prompts import Prompt
from tests.bench.fakes import system
from tests.bench.stage import Stage
from tests.bench.test_report import Page

STEPS = {
    "model": "toy", "dtype": "float32", "device": "cpu", "bandwidth": 1e9, "weight_bytes": 10**6,
    "steps": [{"batch": 1, "context": 8, "rows": r, "seconds": 0.01 * r, "over_one_row": float(r),
               "floor_seconds": 0.001, "floor_share": 0.1 / r} for r in (1, 2, 4)],
}  # fmt: skip


def fails(label: str) -> None:
    raise RuntimeError("<b>bang</b>")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    from outrider.bench.machine import machine

    monkeypatch.setattr("outrider.bench.runner.bandwidth", lambda device: 1e9)
    monkeypatch.setattr("outrider.bench.runner.measured_steps", lambda *a, **k: STEPS | {"machine": machine()})
    monkeypatch.setattr("outrider.bench.runner.SETTLE_S", 0.0)
    systems = [
        system("plain", 1.0, weight_bytes=10**8), system("<i>fast", 0.5, accepted=2.5),
        system("peer", 0.8, runtime="peer", baseline="peer", version="3.1", weights="Q4_1"),
        system("gone", 1.0, runtime="gone", baseline="gone", on_run=fails),
    ]  # fmt: skip
    suites = [
        Suite("long", [Prompt(f"p{i}", ("ab" * (i + 1),), category=f"g{i % 2}") for i in range(4)]),
        Suite("</script>", [Prompt("q", ("ab",), category="qa")]),
    ]
    journal = Journal()
    bench = Bench(suites, SamplingParams(max_new_tokens=10, seed=0), batches=(1, 2))
    run(Stage(), bench, systems, journal)  # type: ignore[arg-type]
    return results(journal)


def shown(renderable: Any) -> str:
    console = Console(file=io.StringIO(), width=160)
    console.print(renderable)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_page_is_well_formed_and_needs_nothing_but_itself(made: dict[str, Any]) -> None:
    pytest.importorskip("matplotlib")
    page = summary.html(made)
    parser = Page()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    assert parser.addresses and all(a.startswith("data:image/svg+xml;base64,") for a in parser.addresses)
    rest = re.sub(r"data:image/svg\+xml;base64,[\w+/=]+", "", page)
    assert "http" not in rest and "//" not in rest and "<i>" not in rest and "<b>" not in rest
    assert json.loads(parser.data) == json.loads(json.dumps(made))
    for title in ("Speed-up over plain", "Accepted length against", "against batch size", "length of the prompt",
                  "Step time against rows"):  # fmt: skip
        assert title in page
    assert summary.html(made) == page


def test_markdown_has_every_row_and_the_error_of_what_failed(made: dict[str, Any]) -> None:
    text = summary.markdown(made)
    assert re.search(r"\| <i>fast \| 2\.0 \| 2\.00x \| 2\.00-2\.00 \| 1\.60x \| 2\.50 \| 0\.80 \|", text)
    assert "gone failed: <b>bang</b>" in text and "| gone | - |" in text
    assert "| g0 | g1 |" in text and "Cost of a step" in text


def test_the_terminal_fits_and_tells_the_same(made: dict[str, Any]) -> None:
    text = shown(summary.terminal(made))
    assert "2.00x" in text and "gone failed" in text and "bandwidth 1.0 GB/s" in text


def test_weights_that_are_not_the_same_are_listed(made: dict[str, Any]) -> None:
    headers, rows = summary.about(made["sections"][0])
    peer = next(row for row in rows if row[0] == "peer")
    assert dict(zip(headers, peer, strict=True))["weights"] == "Q4_1" and "3.1" in peer


def test_a_slower_system_is_found_and_noise_is_not(made: dict[str, Any]) -> None:
    after = copy.deepcopy(made)
    fast = after["sections"][0]["methods"][1]
    fast["speedup"], fast["speedup_interval"] = 1.5, [1.4, 1.6]
    peer = after["sections"][0]["methods"][2]
    peer["speedup_interval"] = [0.99, 1.01]
    found = diff.diff(made, after)
    verdicts = {(r["section"], r["method"]): r["verdict"] for r in found["rows"]}
    name = made["sections"][0]["name"]
    assert verdicts[name, "<i>fast"] == "slower" and verdicts[name, "peer"] == "same" and found["slower"] == 1
    assert diff.diff(after, made)["faster"] == 1 and found["same_machine"]
    assert "slower" in shown(diff.terminal(found)) and json.dumps(found)


def test_a_changed_output_outweighs_speed(made: dict[str, Any]) -> None:
    after = copy.deepcopy(made)
    after["sections"][0]["methods"][1]["identical"] = False
    rows = diff.diff(made, after)["rows"]
    assert [r["verdict"] for r in rows].count("output changed") == 1


def test_what_only_one_result_has_is_named(made: dict[str, Any]) -> None:
    after = copy.deepcopy(made)
    after["machine"]["cpu"] = "another"
    del after["sections"][0]["methods"][1]
    found = diff.diff(made, after)
    assert found["only_before"] == [[made["sections"][0]["name"], "<i>fast"]] and not found["same_machine"]
    assert "only in the first: <i>fast" in shown(diff.terminal(found))


def test_a_file_that_holds_no_results_is_refused(tmp_path: Path) -> None:
    for content, message in (("{}", "no results"), ("nonsense", "not JSON"), ("[]", "no results")):
        path = tmp_path / "a.json"
        path.write_text(content)
        with pytest.raises(InputError, match=message):
            diff.load(path)


def test_step_costs_are_held_against_the_floor() -> None:
    from outrider.bench.machine import machine

    result = STEPS | {"machine": machine()}
    assert steps.step_rows(result)[0][-2:] == ["1.00", "10%"] and "bandwidth 1.0 GB/s" in steps.headlines(result)[0]
    pytest.importorskip("matplotlib")
    assert "data:image/svg" in steps.html(result)
