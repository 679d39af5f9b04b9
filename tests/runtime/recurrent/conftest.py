"""Texts of a few tokens meet what begins late in long ones: the ends of stretches, and the borders of copies."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def short_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.runtime.recurrent.states.SEGMENT", 5)
    monkeypatch.setattr("outrider.runtime.eager.backend.COPIED", 4)
