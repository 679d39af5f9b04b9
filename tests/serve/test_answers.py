"""What stands beside an answer: usage, timings, origins, reports, corpora; from records, without a server."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from outrider.api import Outrider
from outrider.core.generation import FinishReason, TokenLogprob
from outrider.core.params import SamplingParams
from outrider.serve.answer.choice import choices, completion_logprobs, prompt_report, timings, usage
from outrider.serve.link.local import describe
from outrider.serve.link.seam import Delta, End, PromptReport, Request
from outrider.serve.parse.reader import Reading
from outrider.serve.text import Text
from tests.store.conftest import make_store

STATS = {"steps": 2, "drafted": 6, "accepted": 3, "draft_s": 0.1, "verify_s": 0.2, "rest_s": 0.1, "ttft_ms": 50.0}


def test_usage_counts_a_prompt_once_and_reasoning_apart() -> None:
    request = Request("x", (1, 2, 3), SamplingParams(n=2, prediction=(5, 6, 7)))
    made = choices([request], Reading())
    for sample in (0, 1):
        choice = made[0, sample]
        choice.take(Delta(sample, (4, 5), "<think>hm"))
        choice.take(Delta(sample, (6,), "</think>Yes"))
        choice.take(End(sample, FinishReason.EOS, stats=STATS, accepted_prediction=2, cached_tokens=2))
    counts = usage(made.values())
    assert (counts["prompt_tokens"], counts["completion_tokens"], counts["total_tokens"]) == (3, 6, 9)
    assert counts["prompt_tokens_details"]["cached_tokens"] == 2
    details = counts["completion_tokens_details"]
    assert (details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]) == (4, 2)
    assert details["reasoning_tokens"] == 4
    figures = timings(made.values())
    assert (figures["steps"], figures["draft_n"], figures["draft_n_accepted"]) == (4, 12, 6)
    assert figures["accepted_length"] == 1.5 and round(figures["predicted_per_second"], 3) == 7.5
    assert made[0, 0].parsed.reasoning == "hm" and made[0, 0].parsed.content == "Yes"


def test_a_report_names_the_ranks_and_the_older_form_the_offsets(engine: Outrider) -> None:
    text = Text(engine.tokenizer, "small")
    one, two = engine.encode("One two")[:2]
    found = (None, TokenLogprob(two, -2.0, -2.0, ((one, -0.5, -0.5), (two, -2.0, -2.0))))
    shown = prompt_report(PromptReport(found), text)
    assert shown is not None and shown[0] is None and shown[1] is not None
    assert shown[1][str(two)] == {"logprob": -2.0, "rank": 2, "decoded_token": text.piece(two)[0]}
    older = completion_logprobs([TokenLogprob(one, -1.0, -1.0, ()), found[1]], 0, text)
    assert older["text_offset"] == [0, len(text.piece(one)[0])] and older["token_logprobs"] == [-1.0, -2.0]


def test_corpora_are_told_of_without_their_place(engine: Outrider, tmp_path: Path) -> None:
    assert describe(engine).corpora == ()
    make_store(tmp_path / "docs", [[[0, 1, 2, 3]]])
    recipe = engine.recipe()

    class Options:
        store = str(tmp_path / "docs")

    engine._recipes[engine.method] = replace(recipe, options=Options())
    try:
        (corpus,) = describe(engine).corpora
    finally:
        engine._recipes[engine.method] = recipe
    assert corpus["name"] == "docs" and corpus["documents"] == 1 and str(tmp_path) not in str(corpus)
