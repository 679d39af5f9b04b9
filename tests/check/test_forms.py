"""The gate over texts of a form: what is exact passes, and each bug that only shows there is caught by a named part."""

from __future__ import annotations

import pytest

from outrider.check import forms
from outrider.check.gate import QUICK, Outcome, Size, check
from outrider.core.errors import UnknownName
from outrider.models import LoadedModel

TINY = Size(3, 24, 20, 5, 16, 16, 60, 3, thorough=False)


@pytest.mark.usefixtures("small_enumeration")
@pytest.mark.parametrize("method", ["prompt-lookup", pytest.param("mix", marks=pytest.mark.slow)])
def test_quotes_are_those_of_plain_decoding_and_every_planted_bug_is_caught(
    tiny_llama: LoadedModel, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        forms.FORMS, "copy", ({"quote": True, "logit_bias": {2: -1.0}},)
    )  # texts of more than a few tokens
    planted = [*forms.UNDER_A_FORM.values()]
    report = check(tiny_llama, method, bugs=planted, size=TINY, constraint="copy")
    assert all(part.outcome in (Outcome.PASSED, Outcome.SKIPPED) for part in report.parts)
    caught = {one.bug.name: one.caught_by for one in report.bugs}
    assert caught.keys() == forms.UNDER_A_FORM.keys() and all(caught.values()), caught
    assert report.settings["constraint"] == "copy"


def test_unknown_constraints_and_bugs_list_the_known_ones() -> None:
    with pytest.raises(UnknownName, match="did you mean json"):
        forms.find_form("jsno")
    with pytest.raises(UnknownName, match="with --constraint"):
        forms.named("sibling-mask", False)
    assert len(forms.named("all", True)) == len(forms.named("all", False)) + len(forms.UNDER_A_FORM)


@pytest.mark.slow
@pytest.mark.parametrize("constraint", sorted(forms.FORMS))
def test_quick_gate_under_a_form_on_the_embedded_model(smollm2: LoadedModel, constraint: str) -> None:
    report = check(smollm2, "mix", size=QUICK, bugs=[*forms.UNDER_A_FORM.values()], constraint=constraint)
    assert report.verdict == "same output", [(p.name, p.summary) for p in report.parts]
    greedy = next(part for part in report.parts if part.name == "greedy")
    assert greedy.outcome is Outcome.PASSED and greedy.proposed
