"""Graphs of one shape beside the graph of any shape: the plugin fuses more of them and works out nothing at a step.

A step of a small model takes two thirds to nine tenths of its time there, but compiling takes seconds and holds the
weights once more. So a shape is compiled when the steps that were run without it would have paid for it, in the
background, and few are kept. The first step of each is run both ways: a graph that gives another bit is left out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from outrider.runtime.openvino.request import Request

log = logging.getLogger("outrider")
ROWS = (1, 2, 3, 4, 8, 16)  # small trees are the usual ones, and without AVX-512 every row costs
SAVED = 0.2  # of a step's time
MAX_GRAPHS = 12
StepShape = tuple[int, int]  # rows, blocks of text


class FixedShapes:
    def __init__(self, make: Callable[[StepShape], Request], seconds: float, fits: Callable[[], bool]) -> None:
        """`make` compiles, `seconds` is what that takes, `fits` says whether memory for one more is to be had."""
        self._make, self._seconds, self._fits = make, seconds, fits
        self._spent: dict[StepShape, float] = {}  # seconds that steps of a shape would have saved
        self._coming: dict[StepShape, Future[Request]] = {}
        self._ready: dict[StepShape, Request] = {}  # the last used last
        self._refused: set[StepShape] = set()
        self._checked: set[StepShape] = set()
        self._worker = ThreadPoolExecutor(1, "outrider-shapes")

    def find(self, rows: int, blocks: int) -> StepShape | None:
        """The shape that a step of so many rows runs in: its own size, or the next one while that is not there."""
        self._collect()
        sizes = [size for size in ROWS if size >= rows][:2]
        return next((s for size in sizes if (s := (size, blocks)) in self._ready), None)

    def request(self, shape: StepShape) -> Request:
        self._ready[shape] = self._ready.pop(shape)
        return self._ready[shape]

    def unchecked(self, shape: StepShape) -> bool:
        return shape not in self._checked

    def checked(self, shape: StepShape, same: bool) -> None:
        """Changes state: whether its first step had the same bits as without it."""
        self._checked.add(shape)
        if not same:
            log.info("steps of %d rows run in the graph of any shape: a fixed one gives other bits", shape[0])
            self._ready.pop(shape, None)
            self._refused.add(shape)

    def missed(self, rows: int, blocks: int, seconds: float) -> None:
        """Changes state: a step of so many rows took so long; counts where it had no graph of its own."""
        size = next((size for size in ROWS if size >= rows), None)
        if size is None or (shape := (size, blocks)) in self._ready or shape in self._coming or shape in self._refused:
            return
        self._spent[shape] = self._spent.get(shape, 0.0) + SAVED * seconds
        if self._spent[shape] >= self._seconds:
            self._begin(shape)

    def make_now(self, shape: StepShape) -> None:
        """Changes state: compile and wait for it."""
        if shape not in self._ready and shape not in self._refused:
            if shape not in self._coming:
                self._begin(shape)
            if shape in self._coming:
                self._coming[shape].exception()
                self._collect()

    def _begin(self, shape: StepShape) -> None:
        if not self._fits():
            self._refused.add(shape)
            return
        self._coming[shape] = self._worker.submit(self._make, shape)

    def _collect(self) -> None:
        for shape in [shape for shape, future in self._coming.items() if future.done()]:
            future = self._coming.pop(shape)
            if error := future.exception():
                log.warning("steps of %d rows run in the graph of any shape: %s", shape[0], error)
                self._refused.add(shape)
                continue
            self._ready[shape] = future.result()
            if len(self._ready) > MAX_GRAPHS:
                oldest = next(iter(self._ready))
                del self._ready[oldest]
                self._spent.pop(oldest, None)
                self._checked.discard(oldest)

    def release(self, but: Request) -> None:
        """Changes state: all but one let go of the arrays they read."""
        for request in self._ready.values():
            if request is not but:
                request.release()

    def close(self) -> None:
        """Changes state: nothing more is begun; what is being compiled comes to its end unused."""
        self._worker.shutdown(wait=False, cancel_futures=True)
