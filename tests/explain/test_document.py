"""The document: its pieces are the text, everything in it is plain JSON, and one file holds it whatever it says."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

import pytest

from outrider.core.errors import InputError
from outrider.core.params import SamplingParams
from outrider.explain import Explanation, document, explain, page_files, single_file, traced
from outrider.explain.picture import FOLDER
from tests.explain.made import WORDS, decode, made, plain_of


def test_pieces_join_to_the_text_and_candidates_have_theirs() -> None:
    generation = made()
    doc = json.loads(json.dumps(document(generation, decode)))
    assert "".join(doc["pieces"]) == generation.text
    assert len(doc["pieces"]) == len(doc["origins"]) == len(generation.token_ids)
    for step in doc["trace"]["steps"]:
        assert all(doc["texts"][str(token)] == decode([token]) for token in step["tree"]["tokens"])


def test_a_stop_string_and_a_stop_token_are_not_shown() -> None:
    generation = made()
    stop = decode(generation.token_ids[4:6])
    cut = document(generation, decode, stop=[stop])
    assert stop not in "".join(cut["pieces"]) and len(cut["pieces"]) == len(generation.token_ids)
    last = generation.token_ids[-1]
    assert document(generation, decode, skip=[last])["pieces"][-1] == ""


def test_plain_beside_it_says_how_many_tokens_are_identical() -> None:
    generation = made()
    same = document(generation, decode, plain=plain_of(generation))["plain"]
    assert same["same"] and same["identical"] == len(generation.token_ids)
    assert same["ended_s"] == sorted(same["ended_s"]) and len(same["ended_s"]) == len(generation.token_ids)
    other = document(generation, decode, plain=plain_of(generation, differs_at=5))["plain"]
    assert not other["same"] and other["identical"] == 5


def test_a_text_without_a_trace_has_a_document_too() -> None:
    generation = made()
    object.__setattr__(generation, "trace", None)
    doc = document(generation, decode)
    assert doc["trace"] is None and doc["texts"] == {}


def test_the_single_file_holds_the_document_whatever_the_text_says() -> None:
    assert any("</script" in word for word in WORDS)
    doc = document(made(), decode, prompt="</script><!-- <script>alert(1)</script>")
    page = single_file(doc)
    inside = re.search(r'<script type="application/json" id="document">(.*?)</script>', page, re.DOTALL)
    assert inside is not None and json.loads(inside[1]) == doc
    assert page.count("<script") == 2 and page.count("</script>") == 2


def test_the_single_file_asks_for_nothing_and_allows_nothing_inline_but_itself() -> None:
    page = single_file(document(made(), decode))
    policy = html.unescape(re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1])  # type: ignore[index]
    assert "unsafe" not in policy and "default-src 'none'" in policy and "connect-src" not in policy
    assert not re.search(r'(?:src|href)="(?!data:)', page)
    script = page[page.rindex('<script type="module">') :]
    assert not re.search(r"^(?:import|export) ", script, re.MULTILINE)


def test_no_two_modules_share_a_name_that_the_single_file_joins() -> None:
    names = re.findall(
        r"^(?:export )?(?:async )?(?:function|class|const|let) (\w+)",
        "\n".join(path.read_text(encoding="utf-8") for path in FOLDER.glob("*.js") if path.name != "app.js"),
        re.MULTILINE,
    )
    assert len(names) == len(set(names)), sorted(name for name in names if names.count(name) > 1)


def test_every_module_that_is_imported_is_a_file_of_the_page() -> None:
    files = page_files()
    for path in files.values():
        for name in re.findall(r'from "\./([^"]+)"', path.read_text(encoding="utf-8")):
            assert name in files, f"{path.name} imports {name}"


def test_a_notebook_gets_a_frame_that_cannot_reach_it() -> None:
    doc = document(made(), decode)
    shown = Explanation(made(), doc)._repr_html_()
    assert shown.startswith('<iframe sandbox="allow-scripts"') and shown.count("<") == 2
    assert html.unescape(re.search(r'srcdoc="([^"]*)"', shown)[1]) == single_file(doc)  # type: ignore[index]


def test_runs_beside_each_other_have_one_seed_and_a_trace() -> None:
    params = traced(SamplingParams(temperature=1.0, n=3))
    assert params.trace and params.n == 1 and params.seed is not None
    assert traced(SamplingParams(seed=5)).seed == 5


def test_a_page_is_saved_and_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    generation = made()
    messages = [{"role": "user", "content": "Hi"}]
    page = explain([generation, plain_of(generation)], messages, SamplingParams(), decode, "toy")
    assert page.save(tmp_path / "page.html").read_text() == page.html
    assert page.document["prompt"] == "user: Hi" and page.document["plain"]["same"]
    with pytest.raises(InputError, match="does not exist"):
        page.save(tmp_path / "none" / "page.html")
