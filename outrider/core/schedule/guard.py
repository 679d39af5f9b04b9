"""Calls to drafters: one that fails is left behind, its sequences go on; logged once a method, and counted."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from outrider.core.sequence import Running

log = logging.getLogger("outrider")


class Guard:
    def __init__(self, strict: bool) -> None:
        self.strict = strict  # raise a drafter's error instead
        self._logged: set[str] = set()

    def call(self, batch: Sequence[Running], call: Callable[..., None], *args: object) -> None:
        """A call to the drafter of these sequences; where it fails, they go on without it."""
        try:
            call(*args)
        except Exception as error:
            for s in batch:
                self.fail(s, error)

    def fail(self, s: Running, error: Exception) -> None:
        """Changes state: the sequence has no drafter any more."""
        if self.strict:
            raise error
        name = s.recipe.name
        if name not in self._logged:
            self._logged.add(name)
            log.warning("drafter of %s failed, going on without it: %r", name, error, exc_info=error)
        s.stats.drafter_failures += 1
        failed, s.drafter = s.drafter, None
        if failed is not None:
            try:
                failed.end(s.slot)
            except Exception:
                log.debug("drafter of %s could not end a failed sequence", name, exc_info=True)
