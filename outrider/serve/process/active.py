"""A request that has not ended, and all that was said of it: enough to go on in another engine."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from outrider.core.generation import FinishReason
from outrider.serve.link.seam import Delta, End, Event, Request
from outrider.serve.link.stream import JoinedEvents


@dataclass(slots=True, eq=False)
class Active:
    """Lives in one event loop."""

    request: Request
    stream: JoinedEvents
    said: dict[int, list[int]]  # tokens of each sample
    begun: float = field(default_factory=time.monotonic)
    ended: set[int] = field(default_factory=set)
    names: list[str] = field(default_factory=list)  # that the engine of now knows it by
    taken: bool = False  # by an engine: whoever submitted it does not try any more
    reported: bool = False  # on its prompt
    progress: bool = False  # anything came from the engine of now
    fruitless: int = 0  # engines that died without a token of it
    on_trial: bool = False

    @classmethod
    def of(cls, request: Request, leave: Callable[[str], None]) -> Active:
        """Nothing said yet but what the request resumes; `leave` is told its name when its reader goes."""
        said = {request.sample + i: list(request.resume) for i in range(request.params.n)}
        return cls(request, JoinedEvents(len(said), partial(leave, request.id)), said)

    def hear(self, event: Event) -> None:
        """Changes state: an engine said this."""
        if isinstance(event, Delta):
            self.said[event.sample] += event.tokens
            self.progress, self.fruitless = True, 0
        elif isinstance(event, End):
            self.ended.add(event.sample)
        else:
            self.reported = True

    def ends(self, finish: FinishReason, error: str) -> list[Event]:
        """Changes state: what is left ends here, without an engine that could say so."""
        seed = self.request.params.seed or 0
        made: list[Event] = [End(sample, finish, seed=seed, error=error) for sample in self.left()]
        self.ended |= set(self.said)
        return made

    def left(self) -> list[int]:
        return [sample for sample in self.said if sample not in self.ended]

    def again(self) -> list[Request]:
        """What another engine is asked, so that this one goes on where it was."""
        request = self.request
        if request.deadline_s is not None:
            spent = time.monotonic() - self.begun
            request = replace(request, deadline_s=max(request.deadline_s - spent, 0.001))
        if self.reported:
            request = replace(request, params=request.params.with_(prompt_logprobs=None))
        if not self.ended and not any(self.said.values()):
            return [request]
        single = replace(request.params, n=1)
        return [
            replace(request, id=self._name(sample), params=single, sample=sample, resume=tuple(self.said[sample]))
            for sample in self.left()
        ]

    def _name(self, sample: int) -> str:
        return self.request.id if len(self.said) == 1 else f"{self.request.id}~{sample}"
