"""A gate that is done in seconds."""

from __future__ import annotations

import pytest

from outrider.check import exhaustive, gate


@pytest.fixture
def small_enumeration(monkeypatch: pytest.MonkeyPatch) -> None:
    """The enumerations have tests of their own; where the gate is tested they are kept short."""
    monkeypatch.setattr(gate, "one_a_family", lambda: ["prompt-lookup"])
    monkeypatch.setattr(exhaustive, "SMALL", ((1, 1), (2, 1)))
    monkeypatch.setattr(exhaustive, "SHAPES", ((1, 1), (2, 1)))
    monkeypatch.setattr(exhaustive, "CASES", exhaustive.CASES[:1])
