"""Sleep: a drafter that learns from the target's rows after every step is put to sleep while that does not pay.

A table of likely tokens is only as good as the rows it has read, so it is not judged step by step: awake it reads every
step's rows and may be asked for candidates, asleep it does neither. Each step awake tells how much faster it was
expected to be with the drafter than without it, reading included; the second half of a trial counts, since a table
fills while it reads. After a trial that did not pay the drafter sleeps so long that trials cost a set share of the
time. Changes no output. Cost: nothing to speak of.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(slots=True)
class SleepSchedule:
    """Of one drafter."""

    trial: int = 48  # steps awake before they are judged
    explore: float = 0.01  # of the time: what trials may cost
    longest: int = 4096  # steps of a sleep
    asleep: int = 0  # steps still to sleep
    _seen: int = 0  # steps awake since the last sleep
    _gain: float = 0.0  # mean logarithm of the speed with the drafter over that without it

    @property
    def awake(self) -> bool:
        return self.asleep == 0

    def learn(self, gain: float) -> None:
        """Changes state: a step awake was expected to be e to the `gain` times as fast as without the drafter."""
        self._seen += 1
        self._gain += (gain - self._gain) / min(self._seen, self.trial // 2)
        if self._seen >= self.trial and self._gain < 0:
            loss = self.trial * (math.exp(-self._gain) - 1)  # in plain steps
            self.asleep = max(self.trial, min(int(loss / self.explore), self.longest))
            self._seen, self._gain = 0, 0.0

    def sleep(self) -> None:
        """Changes state: a step asleep has gone by."""
        self.asleep = max(self.asleep - 1, 0)
