"""The training curve as a picture: loss and held-out acceptance by step. Left out where matplotlib is not installed."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outrider.train.loop import Point

log = logging.getLogger("outrider")


def draw_curve(curve: Sequence[Point], path: Path) -> None:
    """Changes the folder: writes an SVG."""
    if find_spec("matplotlib") is None:
        log.warning("no picture of the curve: it needs matplotlib; run: pip install 'outrider[train]'")
        return
    from matplotlib import rc_context
    from matplotlib.figure import Figure  # without pyplot: no global state, no display

    steps = [point.step for point in curve]
    with rc_context({"svg.hashsalt": "outrider", "font.size": 9}):
        figure = Figure(figsize=(8, 3.2), layout="constrained")
        losses, rates = figure.subplots(1, 2)
        losses.plot(steps[1:], [point.loss for point in curve[1:]], color="#0b6e99")
        losses.set(title="training loss an answer token", xlabel="step")
        rates.plot(steps, [point.sampled for point in curve], color="#8c8c8c", label="drawn, depth 1")
        rates.plot(steps, [point.greedy for point in curve], color="#d9730d", label="greedy, depth 1")
        for depth in range(1, max((len(point.depths) for point in curve), default=0)):
            values = [point.depths[depth] for point in curve]
            rates.plot(steps, values, color="#d9730d", alpha=0.8 / depth, lw=1, label=f"greedy, depth {depth + 1}")
        rates.set(title="held-out acceptance", xlabel="step", ylim=(0, 1))
        rates.legend(frameon=False, fontsize=7)
        for axes in (losses, rates):
            axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, format="svg", metadata={"Date": None})
