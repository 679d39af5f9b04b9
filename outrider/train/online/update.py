"""What became of the updates of a drafter that learns while it is used."""

from __future__ import annotations

from dataclasses import dataclass

UPDATES = 1024  # that are told of: the newest


@dataclass(frozen=True, slots=True)
class Update:
    """What became of one update: "taken", "refused" before it was used, or "rolled back" after it was."""

    rows: int  # seen so far
    outcome: str
    before: float  # acceptance of the drafter in use, or of the one before it
    after: float
