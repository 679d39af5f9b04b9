"""The gate's report: what each part found, which planted bugs were caught, the verdict, and how it is written down."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from outrider.check.bugs import Bug


class Outcome(StrEnum):
    PASSED = "passed"
    REFUTED = "refuted"
    SKIPPED = "skipped"  # says nothing about this method; the summary says why
    VACUOUS = "vacuous"  # nothing spoke against it, but the method proposed nothing that could have
    INCOMPLETE = "incomplete"


@dataclass(slots=True)
class GatePart:
    name: str
    outcome: Outcome = Outcome.INCOMPLETE
    summary: str = ""
    seconds: float = 0.0
    proposed: int | None = None  # candidates of the method's own that were looked at; None: the part looks at none
    read_evidence: Callable[[], dict[str, Any]] = dict  # asked for at the end, so that an interrupted part has some too

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name, "outcome": str(self.outcome), "summary": self.summary, "proposed": self.proposed,
            "seconds": self.seconds, "evidence": self.read_evidence(),
        }  # fmt: skip


@dataclass(slots=True)
class Planted:
    """One bug and what became of it: `caught` by parts, `missed`, or `cannot show` with the reason."""

    bug: Bug
    outcome: str = "incomplete"
    reason: str = ""
    parts: list[GatePart] = field(default_factory=list)

    @property
    def caught_by(self) -> list[str]:
        return [part.name for part in self.parts if part.outcome is Outcome.REFUTED]

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.bug.name, "what": self.bug.what, "outcome": self.outcome, "caught_by": self.caught_by,
            "reason": self.reason, "parts": [part.as_dict() for part in self.parts],
        }  # fmt: skip


@dataclass(slots=True)
class Report:
    settings: dict[str, Any]
    parts: list[GatePart] = field(default_factory=list)
    bugs: list[Planted] = field(default_factory=list)
    interrupted: bool = False
    seconds: float = 0.0

    @property
    def verdict(self) -> str:
        if any(part.outcome is Outcome.REFUTED for part in self.parts):
            return "refuted"
        if any(planted.outcome == "missed" for planted in self.bugs):
            return "a planted bug was missed"
        if self.interrupted:
            return "incomplete"
        return "same output"

    @property
    def hint(self) -> str:
        """What a reader must know before believing the verdict; empty where the method was put to the test."""
        counts = [part.proposed for part in self.parts if part.proposed is not None]
        if not self.settings.get("speculates") or not counts or any(counts):
            return ""
        needs = self.settings["needs"]
        given = "other prompts (--prompts)" if needs == "nothing" else f"what it needs ({needs})"
        return (
            f"{self.settings['method']} proposed nothing in any run: plain decoding was tested, and the rule on trees "
            f"of the gate's own, but not its drafting; give it {given}"
        )

    @property
    def status(self) -> int:
        """What a process should exit with."""
        return 130 if self.interrupted else 0 if self.verdict == "same output" else 1

    def as_dict(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict, "hint": self.hint, "settings": self.settings, "seconds": self.seconds,
            "parts": [part.as_dict() for part in self.parts], "bugs": [planted.as_dict() for planted in self.bugs],
        }  # fmt: skip
