"""A gate that is done in seconds."""

from __future__ import annotations

import pytest

from outrider.check import exhaustive


@pytest.fixture
def small_enumeration(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exhaustive part has tests of its own; where the gate is tested it is kept short."""
    monkeypatch.setattr(exhaustive, "SMALL", ((1, 1), (2, 1)))
    monkeypatch.setattr(exhaustive, "SHAPES", ((1, 1), (2, 1)))
    monkeypatch.setattr(exhaustive, "CASES", exhaustive.CASES[:1])
