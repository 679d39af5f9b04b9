"""What the noise chooses is found within the pass: the tokens that are found behind it, in any company."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from outrider.control.fixed import Fixed
from outrider.core import target_rows
from outrider.core.engine import Engine
from outrider.core.noise import VERIFY
from outrider.core.protocols import Recipe
from outrider.core.records import Budget
from outrider.core.rows import choices
from outrider.core.rows import races as module
from outrider.core.rows.races import races
from outrider.core.sampling import SamplingParams
from outrider.core.target_rows import TargetRows
from outrider.core.tree import root
from outrider.draft.lookup.prompt_lookup import PromptLookup
from outrider.runtime.slots import SlotTarget
from outrider.runtime.targets import cuda_target, eager_target
from outrider.verify.invariant import Invariant
from outrider.verify.recursive import Recursive
from tests.runtime.cuda.test_backend import DEVICE
from tests.runtime.test_steps import small

PROMPTS = [[1, 2, 3, 1, 2], [4, 5, 4], [6], [7, 8, 7, 8, 7]]
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 1.0}, {"temperature": 0.0}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 1.4},
]  # fmt: skip
runtime = partial(cuda_target, warm_up=False)


def texts(target: SlotTarget, settings: list[dict[str, Any]], drafts: bool, rule: Any = None) -> list[list[int]]:
    plain = Recipe("plain", None, rule or Invariant(), Fixed(Budget(0, 0)))
    copies = Recipe("copies", PromptLookup(), rule or Invariant(), Fixed(Budget(6, 4)))
    engine = Engine(target, copies if drafts else plain, strict=True)
    asked = [SamplingParams(max_new_tokens=24, seed=5 + i, **given) for i, given in enumerate(settings)]
    handles = [engine.submit(prompt, params) for prompt, params in zip(PROMPTS, asked, strict=True)]
    return [handle.result().token_ids for handle in handles]


@pytest.mark.parametrize("drafts", [False, True])
def test_texts_are_those_of_a_runtime_that_chooses_behind_the_pass(drafts: bool) -> None:
    model = small().to(DEVICE)
    want = texts(eager_target(model, max_slots=4), SETTINGS, drafts=False)
    assert texts(runtime(model, max_slots=4), SETTINGS, drafts) == want


def test_nothing_is_left_to_choose_behind_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    model, settings = small().to(DEVICE), [{"temperature": 0.5 + 0.3 * i} for i in range(4)]
    target = runtime(model, max_slots=4)
    for owner, name in ((TargetRows, "probs"), (choices, "_drawn"), (target_rows, "pick_score")):
        monkeypatch.setattr(owner, name, lambda *_: pytest.fail("it was chosen behind the pass"))
    assert all(len(text) == 24 for text in texts(target, settings, drafts=True))


def test_a_race_that_is_run_with_another_key_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small().to(DEVICE)
    want = texts(eager_target(model, max_slots=4), SETTINGS, drafts=False)
    keys = module.target_keys
    monkeypatch.setattr(module, "target_keys", lambda *given: np.roll(keys(*given), 1))
    assert texts(runtime(model, max_slots=4), SETTINGS, drafts=False) != want


def test_only_those_race_whose_rows_a_temperature_alone_reshapes() -> None:
    target = runtime(small().to(DEVICE), max_slots=4)
    recipes = [Recipe("plain", None, rule, Fixed(Budget(0, 0))) for rule in (Invariant(), Recursive())]
    engine = Engine(target, recipes[0], strict=True)
    given: list[dict[str, Any]] = [
        {"temperature": 1.0}, {"temperature": 1.0, "repetition_penalty": 1.2}, {}, {"temperature": 1.0},
    ]  # fmt: skip
    for i, (prompt, settings) in enumerate(zip(PROMPTS, given, strict=True)):
        params = SamplingParams(max_new_tokens=9, seed=3, **settings)
        engine.submit(prompt, params, recipes[i == 3])
    engine.step()
    running = engine.running
    assert len(running) == 4
    trees = {s.slot: root(s.pending) for s in running}
    found = races(running, trees)
    assert [s.slot in found for s in sorted(running, key=lambda s: s.request)] == [True, False, False, False]
    (first,) = [s for s in running if s.slot in found]
    assert found[first.slot].keys.tolist() == [first.noise(VERIFY).target_key(())]  # type: ignore[attr-defined]
    engine.close()
