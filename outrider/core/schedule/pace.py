"""Pace: how many rows of prompts go into a pass, so that nobody who is being answered waits too long for a token.

Learns what a step takes without prompts, and what a row of a prompt adds. Where nobody waits for a token, passes are
as wide as the target asks for. Changes no output.
"""

from __future__ import annotations

from dataclasses import dataclass

SHARE = 0.2  # of what is known, that a new step changes
USUAL = 2.5  # steps that a step with prompts may take where nobody says how long
LEAST = 8  # rows that a prompt gets however slow they are: it is to arrive some day
FIRST = 32  # rows of the first pass, before anything is known


@dataclass(slots=True)
class Pace:
    max_gap_s: float | None = None  # seconds between two deliveries of a text; None: `USUAL` steps
    step_s: float = 0.0  # of a step without prompts
    verify_s: float = 0.0  # of its pass
    row_s: float = 0.0  # that a row of a prompt adds

    def rows(self, most: int, decoding: bool) -> int:
        """Of prompts in the next pass, beside answers or without any."""
        if not decoding:
            return most
        if not self.row_s or not self.step_s:
            return min(FIRST, most)
        gap = self.max_gap_s if self.max_gap_s is not None else USUAL * self.step_s
        return min(max(int((gap - self.step_s) / self.row_s), LEAST), most)

    def of_prompts(self, rows: int, seconds: float) -> float:
        """Seconds of a pass that prompts took, beside answers."""
        known = rows * self.row_s if self.row_s else seconds - self.verify_s
        return min(max(known, 0.0), 0.9 * seconds)

    def learn(self, prompt_rows: int, decoding: bool, verify: float, step: float) -> None:
        """Changes state: a step took so long, and its pass."""
        if not prompt_rows:
            self.step_s, self.verify_s = _towards(self.step_s, step), _towards(self.verify_s, verify)
        elif not decoding:
            self.row_s = (
                _towards(self.row_s, verify / prompt_rows) if prompt_rows >= LEAST or not self.row_s else self.row_s
            )
        else:
            added = max(verify - self.verify_s, 0.2 * verify)
            self.row_s = _towards(self.row_s, added / prompt_rows)


def _towards(known: float, seen: float) -> float:
    return known + SHARE * (seen - known) if known else seen
