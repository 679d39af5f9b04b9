"""The events of one request on their way to whoever reads them: a slow reader finds several steps joined into one."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable

from outrider.serve.link.seam import Delta, End, Event


class JoinedEvents:
    """Changes state. Holds at most one delta a sample that waits, however slowly it is read; `put` never waits."""

    def __init__(self, samples: int, leave: Callable[[], None]) -> None:
        self._left = samples  # that have not ended yet, for the reader
        self._coming = samples  # likewise for who puts
        self._leave = leave  # called once when the reader leaves before the end
        self._waiting: deque[Event] = deque()
        self._wake = asyncio.Event()
        self._closed = False

    def put(self, events: Iterable[Event]) -> None:
        """In the event loop."""
        for event in events:
            if isinstance(event, Delta):
                for i, before in enumerate(self._waiting):
                    if isinstance(before, Delta) and before.sample == event.sample:
                        self._waiting[i] = before + event
                        break
                else:
                    self._waiting.append(event)
            else:
                self._coming -= isinstance(event, End)
                self._waiting.append(event)
        self._wake.set()

    @property
    def ended(self) -> bool:
        """Whether all ends were put."""
        return self._coming <= 0

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        while not self._waiting:
            if self._left <= 0 or self._closed:
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()
        event = self._waiting.popleft()
        if isinstance(event, End):
            self._left -= 1
        return event

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            self._wake.set()
            if self._left > 0:
                self._leave()
