"""Every registered method on the CPU's runtimes: text to the last token that of plain decoding on it, one by one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import outrider
from outrider import dropin
from outrider.api import Outrider
from outrider.check.gate import QUICK, check
from outrider.core.errors import InputError
from outrider.core.sampling import SamplingParams
from outrider.runtime import choice
from outrider.runtime.choice import build_draft
from outrider.runtime.native.backend import NativeBackend
from outrider.runtime.native.kernels.step import Batch
from outrider.runtime.openvino.cache import Layout
from outrider.runtime.packed import saturates
from tests.check.conftest import small_enumeration
from tests.methods.test_every_method import NAMES, PROMPTS, WITH_A_CHOICE, needed, run

__all__ = ["needed", "small_enumeration"]  # fixtures
WITH_SIDE_ROWS = ("ppd",)  # methods that not every runtime can run


@pytest.fixture(scope="module", autouse=True)
def cache_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def eager_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversion a method would take most of the time; one test has a draft model on the runtime itself."""
    monkeypatch.setattr(choice, "build_draft", lambda model, _, **more: choice.build(model, "eager", **more))


@pytest.fixture(scope="module", params=["openvino", "native"])
def runtime(request: pytest.FixtureRequest) -> str:
    if request.param == "openvino":
        pytest.importorskip("openvino", reason="the extra outrider[openvino] is not installed")
    return request.param


@pytest.fixture(scope="module")
def engine(tiny_llama, runtime: str) -> Iterator[Outrider]:
    with Outrider(tiny_llama, "plain", limits={"max_slots": 3}, strict=True, runtime=runtime) as made:
        assert made.target.traits.runtime == runtime
        yield made


def alone(engine: Outrider, **sampling: Any) -> list[list[int]]:
    """Plain decoding, a prompt at a time."""
    params = SamplingParams(max_new_tokens=24, **sampling)
    return [engine.engine.submit(p, params, engine.recipe("plain")).result().token_ids for p in PROMPTS]


def run_tokens(engine: Outrider, name: str) -> list[list[int]]:
    return [g.token_ids for g in run(engine, engine.recipe(name))]


@pytest.mark.parametrize("name", NAMES)
def test_a_ragged_batch_says_what_plain_decoding_says_one_by_one(engine: Outrider, name: str, needed) -> None:
    """Four prompts for three slots: one waits and takes the place of another."""
    if name in WITH_SIDE_ROWS and not engine.target.traits.side_rows:
        with pytest.raises(InputError, match=f"which {name} needs; use the runtime native, eager or graphs"):
            engine.recipe(name, needed.get(name, {}))
        return
    recipe = engine.recipe(name, needed.get(name, {}))
    assert [g.token_ids for g in run(engine, recipe)] == alone(engine)
    assert engine.target.free_slots == 3


def test_a_draft_model_on_the_same_runtime_is_accepted_and_changes_no_token(
    tiny_llama, engine: Outrider, runtime: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafts: list[Any] = []

    def noted(model: Any, target: Any, **limits: Any) -> Any:
        drafts.append(build_draft(model, target, **limits))
        return drafts[-1]

    monkeypatch.setattr(choice, "build_draft", noted)
    options = {"controller": "fixed", "budget": 3}
    with Outrider(tiny_llama, "draft-model", options, {"max_slots": 3}, strict=True, runtime=runtime) as drafting:
        results = run(drafting, drafting.recipe("draft-model"))
    assert [g.token_ids for g in results] == alone(engine)
    assert [draft.traits.runtime for draft in drafts] == [runtime]
    accepted, drafted = sum(g.stats.accepted for g in results), sum(g.stats.drafted for g in results)
    assert accepted > drafted / 10 > 5, (accepted, drafted)  # other rows would leave chance: 1/64


@pytest.mark.parametrize("name", [n for n in WITH_A_CHOICE if n in ("mix", "eagle3", "draft-model", "suffix")])
def test_sampled_text_of_the_invariant_rule_is_plains(engine: Outrider, name: str, needed) -> None:
    settings = {"temperature": 0.8, "seed": 5, "top_k": 30}
    recipe = engine.recipe(name, {"verifier": "invariant", **needed.get(name, {})})
    assert [g.token_ids for g in run(engine, recipe, **settings)] == alone(engine, **settings)


@pytest.mark.parametrize("name", [n for n in ("mix", "prompt-lookup", "eagle3", "token-recycling") if n in NAMES])
def test_a_stop_in_the_middle_of_an_accepted_path_cuts_where_plain_decoding_stops(
    engine: Outrider, name: str, needed
) -> None:
    plain = alone(engine)
    stops = tuple({tokens[len(tokens) // 2] for tokens in plain})
    recipe = engine.recipe(name, needed.get(name, {}))
    assert [g.token_ids for g in run(engine, recipe, stop_token_ids=stops)] == alone(engine, stop_token_ids=stops)


class Blind(Layout):
    def __init__(self, *of: Any) -> None:
        super().__init__(*of)
        for mask in self.tail_masks:
            mask[:, :1, ..., -mask.shape[4] :] = 0


def blind(self: NativeBackend, blocks: Any, places: Any) -> Batch:
    made = _batch(self, blocks, places)
    return made._replace(sees=np.ones_like(made.sees))


_batch = NativeBackend._batch


def test_siblings_that_see_each_other_are_caught(
    engine: Outrider, runtime: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    plain = alone(engine)
    if runtime == "native":
        monkeypatch.setattr(NativeBackend, "_batch", blind)
    else:
        monkeypatch.setattr("outrider.runtime.openvino.backend.Layout", Blind)
    wrong = [n for n in ("prompt-lookup", "token-recycling", "mix") if run_tokens(engine, n) != plain]
    assert wrong


def test_transformers_generate_runs_on_it(tiny_llama, runtime: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "AUTO", (runtime,))
    model, inputs = tiny_llama.model, torch.tensor([PROMPTS[0], PROMPTS[0][::-1]])
    settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": 20, "pad_token_id": 0}
    try:
        ours = model.generate(inputs, custom_generate=outrider.generate, method="prompt-lookup", **settings)
        assert vars(model)[dropin.SESSION].outrider.target.traits.runtime == runtime
    finally:
        dropin.release(model)
    assert torch.equal(ours, model.generate(inputs, **settings))


@pytest.mark.usefixtures("small_enumeration")  # which no runtime takes part in
@pytest.mark.parametrize("precision", [None, "int8"])
def test_the_gate_is_green_on_it(tiny_llama, runtime: str, precision: str | None) -> None:
    """In a precision of its own the runtime is held against its own plain decoding, which must not move by a bit where
    activations are rounded, and by no more than float32 sums do elsewhere."""
    if precision and runtime == "openvino":
        pytest.importorskip("nncf")
    report = check(tiny_llama, "prompt-lookup", size=QUICK, runtime=runtime, precision=precision)
    assert report.verdict == "same output"
    greedy = next(part.as_dict() for part in report.parts if part.name == "greedy")
    _, told, bound = greedy["summary"].partition("noise bound ")
    noise = float(bound.partition(":")[0]) if told else 0.0
    assert told or "noise 0.0" in greedy["summary"]
    assert precision is None or noise <= (1e-4 if runtime == "openvino" and saturates() else 0.0)
