"""Learning: the drafter of a server learns from what it serves, in a thread, and what it learnt survives the server.

Off unless asked for. Corrections stay in memory, within bytes; an update takes the drafter's place only where it is no
worse on text that it has not learnt from, and is taken back where what comes later says otherwise. Changes no answer.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from outrider.api import Outrider
from outrider.core.errors import InputError
from outrider.train.online.adapt import Adaptation, begin
from outrider.train.online.student import AdaptPlan

log = logging.getLogger("outrider")
SHARE = 0.05  # of the time that updates take on a machine that serves meanwhile
OUTCOMES = {"taken": "taken", "refused": "refused", "rolled back": "rolled_back"}


class Learning:
    def __init__(self, engine: Outrider, folder: Path, plan: AdaptPlan | None = None) -> None:
        """Goes on from what lies in the folder, which is made when there is something to keep."""
        self.folder = folder
        self._adaptation: Adaptation = begin(engine, plan or AdaptPlan(share=SHARE), engine.method)
        self._told = False
        self.resume()
        self._adaptation.source.changed = self.save

    def resume(self) -> None:
        """Not beside a step: goes on from what whichever engine has kept last."""
        self._adaptation.resume(self.folder)

    def save(self) -> None:
        """From any thread. A disk that is full costs what was learnt, and no answer."""
        try:
            self._adaptation.save(self.folder)
        except (OSError, InputError) as error:
            if not self._told:
                log.warning("what the drafter learnt was not kept: %s", error)
            self._told = True

    def close(self) -> None:
        """After the last step."""
        learnt = self._adaptation.source.outcomes["taken"] > 0
        self._adaptation.close()
        if learnt:
            self.save()

    def figures(self) -> dict[str, Any]:
        """For metrics: tokens that were seen, what became of updates, acceptance at the last one."""
        source = self._adaptation.source
        last = source.updates[-1] if source.updates else None
        return {
            "learnt_rows": source.rows, "learning_failed": int(self._adaptation.failed),
            "learning_bytes": source.nbytes,
            "learning_acceptance": 0.0 if last is None else last.after,
            "learning_acceptance_before": 0.0 if last is None else last.before,
            "learning_updates": {name: source.outcomes[outcome] for outcome, name in OUTCOMES.items()},
        }  # fmt: skip
