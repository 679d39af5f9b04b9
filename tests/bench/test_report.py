"""Reports are made from the JSON alone; the page carries all it needs and escapes all it shows."""

from __future__ import annotations

import base64
import io
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

from outrider.bench import report
from outrider.bench.compare import Plan, compare
from outrider.bench.figures import result
from outrider.bench.machine import machine
from outrider.core.errors import InputError, MissingExtra
from outrider.core.files import write_atomic
from outrider.core.params import SamplingParams
from outrider.core.records import Traits
from outrider.store.prompts import Prompt
from tests.bench.stage import Gullible, Stage

VOID = {"meta", "img", "br"}


class Page(HTMLParser):
    """Every tag is closed in order; addresses and the embedded data are collected."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.data = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [str(value) for name, value in attrs if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.data += data


@pytest.fixture
def figures(stage: Stage) -> dict[str, Any]:
    prompts = [Prompt("one", ("aab",), category="</script><b>qa"), Prompt("two", ("cde",), category="rag")]
    contenders = [
        stage.contender("plain"),
        stage.contender("[bold]fast", stage.forced(width=2)),
        stage.contender("broken", stage.forced(accept=0.0, verifier=Gullible())),
    ]
    return result(compare(stage, prompts, contenders, Plan(SamplingParams(max_new_tokens=12))))  # type: ignore[arg-type]


def shown(figures: dict[str, Any]) -> str:
    console = Console(file=io.StringIO(), width=160)
    console.print(report.terminal(figures))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_table_shows_absolute_speed_speedup_and_whether_the_output_is_the_same(figures: dict[str, Any]) -> None:
    text = shown(figures)
    assert re.search(r"\[bold\]fast\s*│\s*3\.0 │\s*3\.00x", text)
    assert "2 of 2 differ" in text and "top-two gap there" in text
    assert "rag" in text and "toy in float64" in text


def test_a_runtime_in_a_precision_of_its_own_is_named_instead_of_the_models(stage: Stage) -> None:
    stage.target.named = Traits("native", "int8")
    plan = Plan(SamplingParams(max_new_tokens=4))
    made = result(compare(stage, [Prompt("one", ("aab",))], [stage.contender("plain")], plan))  # type: ignore[arg-type]
    assert made["settings"]["precision"] == "int8" and made["settings"]["runtime"] == "native"
    assert "toy in int8 by native on cpu" in shown(made) and "float64" not in shown(made)


def test_an_unfinished_or_disturbed_measurement_says_so(figures: dict[str, Any]) -> None:
    assert "interrupted" not in shown(figures)
    figures["complete"] = False
    figures["machine"] |= {"load": 7.5, "cores": 2}
    assert "interrupted: figures are of the 2 answers" in shown(figures) and "load 7.5 on 2 cores" in shown(figures)


def test_the_page_is_well_formed_and_needs_nothing_but_itself(figures: dict[str, Any]) -> None:
    pytest.importorskip("matplotlib")
    page = report.html(figures)
    parser = Page()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    assert len(parser.addresses) == 4 and all(a.startswith("data:image/svg+xml;base64,") for a in parser.addresses)
    for address in parser.addresses:
        assert ElementTree.fromstring(base64.b64decode(address.partition(",")[2])).tag.endswith("svg")
    rest = re.sub(r"data:image/svg\+xml;base64,[\w+/=]+", "", page)
    assert "http" not in rest and "//" not in rest and "<b>" not in rest
    assert json.loads(parser.data) == json.loads(json.dumps(figures))
    assert report.html(figures) == page  # the same figures give the same bytes


def test_a_page_of_nothing_is_still_a_page(stage: Stage) -> None:
    pytest.importorskip("matplotlib")

    def begin() -> Any:
        raise KeyboardInterrupt

    from outrider.bench.contenders import Contender

    contenders = [Contender("plain", "plain", begin)]
    empty = result(compare(stage, [Prompt("one", ("ab",))], contenders, Plan()))  # type: ignore[arg-type]
    assert "<img" not in report.html(empty) and "interrupted" in shown(empty)


def test_without_matplotlib_the_missing_extra_is_named(
    figures: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtra, match=r"outrider\[bench\]"):
        report.html(figures)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.html"
    write_atomic(page, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomic(page, "new" * 10_000 + "\ud800")
    assert page.read_text() == "old" and list(tmp_path.iterdir()) == [page]
    with pytest.raises(InputError, match="cannot be written"):
        write_atomic(tmp_path / "nowhere" / "page.html", "x")


def test_machine_facts_name_neither_host_nor_user_nor_path() -> None:
    import getpass
    import platform

    facts = machine()
    text = json.dumps(facts)
    assert facts["cores"] >= 1 and facts["torch_threads"] >= 1 and facts["cpu"] and facts["torch"]
    assert platform.node() not in text and getpass.getuser() not in text and str(Path.home()) not in text
