"""Examples as modules, on the session's model: short texts, and nothing that takes a minute to get ready."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import outrider
from outrider import api
from outrider.core.params import SamplingParams
from outrider.models import LoadedModel

EXAMPLES = Path(__file__).parents[2] / "examples"


@dataclass
class Examples:
    """Imports an example by its name."""

    max_new_tokens: int = 24  # of all texts, whatever the example asks for

    def __call__(self, name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module


@pytest.fixture
def example(smollm2: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> Examples:
    """What an example loads as "smollm2" is the session's model."""
    load, params, examples = outrider.load, api.Outrider._params, Examples()

    def load_session(name: str, method: str = "mix", **more: Any) -> api.Outrider:
        assert name == "smollm2"
        return load(smollm2.model, method, tokenizer=smollm2.tokenizer, runtime="eager", **more)

    def short(engine: api.Outrider, *given: Any) -> SamplingParams:
        made = params(engine, *given)
        return made.with_(max_new_tokens=min(made.max_new_tokens, examples.max_new_tokens))

    monkeypatch.setattr("outrider.load", load_session, raising=False)
    monkeypatch.setattr(api.Outrider, "_params", short)
    return examples
