"""Forms that the gate can ask texts to have, and the bugs that only show under one.

Under a form texts end where it lets them, so end-of-text is not ignored. What is held against plain decoding is then
the masked distribution: plain decoding asks the automaton at the end of its text only, never at a node of a tree.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.check.bugs import BUGS, Bug
from outrider.check.reference import Job
from outrider.core.errors import UnknownName, did_you_mean
from outrider.core.generation import Origin
from outrider.core.legal import Legal
from outrider.core.params import SamplingArguments
from outrider.core.protocols import Recipe, Target
from outrider.core.records import Verdict
from outrider.core.sequence import Running
from outrider.core.target_rows import TargetRows
from outrider.core.tree import TokenTree

ITEM: dict[str, Any] = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 40},
        "pages": {"type": "integer"},
        "kind": {"enum": ["letter", "report", "other"]},
        "read": {"type": "boolean"},
    },
    "required": ["title", "pages", "kind", "read"],
    "additionalProperties": False,
}
SHORT = {
    "type": "object",
    "properties": {name: ITEM["properties"][name] for name in ("kind", "read")},
    "required": ["kind", "read"],
    "additionalProperties": False,
}
Forms = Sequence[SamplingArguments]
# Jobs take them in turn. The first ends within a few tokens, so that in every run there are texts that end.
FORMS: dict[str, Forms] = {
    "json": ({"json_schema": SHORT}, {"json_schema": {"type": "array", "items": ITEM, "minItems": 1, "maxItems": 4}}),
    "regex": (
        {"regex": r"[A-Z][a-z]{1,8}( [a-z]{1,8}){2}, (End|Stop)"},
        {"regex": r"(([A-Z][a-z]*|[0-9]+)( [a-z]+)*[.,;] )+(End|Stop)"},
    ),
    "copy": ({"quote": True},),
}


def find_form(name: str) -> Forms:
    if name not in FORMS:
        hint = did_you_mean(name, FORMS)
        raise UnknownName(f"unknown constraint {name!r}; {hint}use one of {', '.join(FORMS)}")
    return FORMS[name]


def formed(jobs: Sequence[Job], forms: Forms) -> list[Job]:
    """The same jobs for texts of these forms; as they are where there is none."""
    if not forms:
        return list(jobs)
    ends: SamplingArguments = {"ignore_eos": False}
    return [
        dataclasses.replace(job, params=job.params.with_(**forms[i % len(forms)]).with_(**ends))
        for i, job in enumerate(jobs)
    ]


def _stale(self: Legal, token: int) -> None:
    self._state = self._after(self._state, token)  # what was known of nodes is kept, as if they hung on the new text


def _of_a_sibling(recipe: Recipe, target: Target) -> tuple[Any, str, Any]:
    right = Legal.mask

    def wrong(self: Legal, path: Sequence[int] = ()) -> NDArray[np.int32] | None:
        key = tuple(path)
        others = [other for other in self._states if len(other) == len(key) and other[:-1] == key[:-1] and other != key]
        return right(self, (others or [key[:-1]])[0]) if key else right(self, key)

    return Legal, "mask", wrong


def _past_the_stop(self: Running, tree: TokenTree, verdict: Verdict, rows: TargetRows) -> tuple[int, ...]:
    tokens = (*(int(tree.tokens[node]) for node in verdict.path), verdict.next_token)
    for token in tokens:
        self.origins.append(Origin("", 0))
        self.history.append((token,))
        self._check(token)
    return tokens


UNDER_A_FORM = {
    bug.name: bug
    for bug in (
        Bug(
            "stale-grammar", "what an automaton said of a step's nodes is kept when the text has grown",
            ("greedy", "seeded"), lambda recipe, target: (Legal, "append", _stale),
        ),
        Bug(
            "sibling-mask", "a node is masked as its sibling is, or its parent where it has none",
            ("greedy", "seeded"), _of_a_sibling,
        ),
        Bug(
            "past-the-stop", "an accepted run becomes text whole, also behind an end of text in it",
            ("greedy", "seeded"), lambda recipe, target: (Running, "_append", _past_the_stop),
        ),
    )
}  # fmt: skip


def named(name: str, constrained: bool) -> list[Bug]:
    """One bug, or all that can show: those of a form only where there is one."""
    known = BUGS | (UNDER_A_FORM if constrained else {})
    if name == "all":
        return list(known.values())
    if name not in known:
        more = " (with --constraint)" if name in UNDER_A_FORM else ""
        hint = did_you_mean(name, known)
        raise UnknownName(f"unknown bug {name!r}{more}; {hint}use one of {', '.join(known)}, or no name for all")
    return [known[name]]
