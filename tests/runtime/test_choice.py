"""Which runtime is taken: by name or refused with the remedy, by trial, or the one that runs everything."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.core.errors import InputError, MissingExtra, OutriderError, UnknownName, UnsupportedModel
from outrider.core.protocols import Target
from outrider.core.records import Traits
from outrider.runtime import choice, trial
from outrider.runtime.choice import RUNTIMES, Runtime, build, build_draft, check
from outrider.runtime.eager.backend import EagerBackend
from outrider.runtime.slots import SlotTarget
from outrider.runtime.targets import eager_target

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=31, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=128,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


class OtherBackend(EagerBackend):
    traits = Traits("other")


def taken(target: Target) -> str:
    return target.traits.runtime


def add(monkeypatch: pytest.MonkeyPatch, obstacle: str = "", refuse: str = "", measured: bool = False) -> None:
    def make(model: Any, precision: str, keep: bool, limits: Any) -> Any:
        if refuse:
            raise UnsupportedModel(refuse)
        return SlotTarget(OtherBackend(model), **limits)

    entry = Runtime("other", "a test", ("exact", "coarse"), lambda *_: obstacle, make, measured)
    monkeypatch.setitem(RUNTIMES, "other", entry)
    monkeypatch.setattr(choice, "AUTO", ("other", "eager"))


def test_a_runtime_is_found_by_name_and_a_typo_lists_them(model: Any) -> None:
    assert taken(build(model, "eager")) == "eager"
    with pytest.raises(UnknownName, match="no runtime 'egaer'; did you mean eager. known: auto, .*eager"):
        build(model, "egaer")


def test_auto_takes_the_first_that_runs(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    add(monkeypatch)
    assert taken(build(model, max_slots=2)) == "other"


def test_auto_passes_over_what_cannot_run_here(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    add(monkeypatch, obstacle="needs a card")
    assert taken(build(model)) == "eager"


def test_auto_says_in_one_line_why_a_model_is_not_run_by_it(
    model: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    add(monkeypatch, refuse="has odd layers")
    with caplog.at_level(logging.WARNING):
        assert taken(build(model)) == "eager"
    assert [r.getMessage() for r in caplog.records] == ["runtime other is left out: has odd layers"]


def test_a_named_runtime_is_refused_with_the_reason(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    add(monkeypatch, obstacle="other needs a card; buy one")
    with pytest.raises(InputError, match="buy one"):
        build(model, "other")
    add(monkeypatch, refuse="has odd layers")
    with pytest.raises(UnsupportedModel, match="odd layers"):
        build(model, "other")


def test_a_missing_package_names_the_extra(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"pip install 'outrider\[openvino\]'"):
        build(model, "openvino")
    monkeypatch.setattr(choice, "find_spec", lambda name: None if name == "nncf" else "there")
    with pytest.raises(MissingExtra, match="precision int8 needs the package nncf"):
        build(model, "openvino", "int8")
    assert RUNTIMES["openvino"].obstacle(CPU, "float32") == ""
    assert "CPU" in RUNTIMES["openvino"].obstacle(torch.device("cuda"), "float32")


@pytest.mark.parametrize(("error", "line"), [
    (ImportError("libopenvino.so is missing"), "cannot be imported (libopenvino.so is missing)"),
    (RuntimeError("no such instruction\nat 0x0"), "cannot run it here (no such instruction)"),
    (OSError("disk full"), "cannot run it here (disk full)"),
])  # fmt: skip
def test_a_broken_openvino_is_left_out_in_one_line_and_refused_by_name(
    model: Any, error: Exception, line: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> Any:
        raise error

    monkeypatch.setattr("outrider.runtime.conversions.openvino_graph", broken)
    monkeypatch.setattr(choice, "find_spec", lambda name: "there")
    monkeypatch.setattr(choice, "WORTH_A_TRIAL", 1)
    monkeypatch.setattr(choice, "AUTO", ("openvino", "eager"))
    with caplog.at_level(logging.WARNING):
        assert taken(build(model)) == "eager"
    messages = [r.getMessage() for r in caplog.records]
    assert len(messages) == 1 and line in messages[0] and "\n" not in messages[0] and "eager" in messages[0]
    with pytest.raises(OutriderError, match="eager"):
        build(model, "openvino")


def test_openvino_and_native_are_tried_on_a_cpu_beside_the_one_that_runs_everything() -> None:
    for name in ("openvino", "native"):
        assert choice.AUTO.index(name) < choice.AUTO.index("eager") == len(choice.AUTO) - 1
        assert RUNTIMES[name].measured and RUNTIMES[name].precision == "float32"


def test_native_is_left_out_where_its_copy_of_the_weights_does_not_fit(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.runtime.packed.available", lambda: 1000)
    with pytest.raises(UnsupportedModel, match="once more: .* use openvino or eager"):
        build(model, "native")


def test_a_precision_asks_for_the_runtime_that_has_it(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    add(monkeypatch)
    assert taken(build(model, precision="coarse")) == "other"
    with pytest.raises(InputError, match="no precision 'coarse' in the runtime eager: .*other has exact, coarse"):
        check("eager", "coarse")
    with pytest.raises(InputError, match="no precision 'int3'"):
        check("auto", "int3")


def test_a_draft_follows_its_target_or_runs_eagerly(
    model: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    add(monkeypatch)
    target = build(model, "other")
    assert taken(build_draft(model, target, max_slots=1)) == "other"
    assert taken(build_draft(model, build(model, "eager"))) == "eager"
    add(monkeypatch, refuse="has odd layers")
    assert taken(build_draft(model, target)) == "eager"
    assert "odd layers" in caplog.text


@pytest.mark.parametrize(("seconds", "chosen"), [({"other": 1.0, "eager": 2.0}, "other"),
                                                ({"other": 2.0, "eager": 1.0}, "eager")])  # fmt: skip
def test_a_measured_runtime_is_taken_where_a_trial_says_so_and_tried_once(
    model: Any, seconds: dict[str, float], chosen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(choice, "WORTH_A_TRIAL", 1)
    tried: list[set[str]] = []
    monkeypatch.setattr(trial, "trial", lambda targets: tried.append(set(targets)) or seconds)
    add(monkeypatch, measured=True)
    assert taken(build(model)) == chosen
    assert taken(build(model)) == chosen
    assert tried == [{"other", "eager"}]
    kept = next(tmp_path.rglob("runtimes/*.json"))
    assert json.loads(kept.read_text()) == seconds
    kept.write_text("{")
    assert taken(build(model)) == chosen and len(tried) == 2


def test_a_precision_is_run_by_the_fastest_that_has_it_and_by_the_other_where_that_cannot(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    add(monkeypatch, measured=True)

    class ThirdBackend(EagerBackend):
        traits = Traits("third")

    third = Runtime(
        "third", "a test", ("coarse",), lambda *_: "", lambda m, p, k, li: SlotTarget(ThirdBackend(m), **li), True
    )
    monkeypatch.setitem(RUNTIMES, "third", third)
    monkeypatch.setattr(choice, "AUTO", ("other", "third", "eager"))
    monkeypatch.setattr(trial, "trial", lambda targets: {name: float(name != "third") for name in targets})
    assert taken(build(model, precision="coarse")) == "third"
    add(monkeypatch, obstacle="pip install a card", measured=True)
    monkeypatch.setattr(choice, "AUTO", ("other", "third", "eager"))
    assert taken(build(model, precision="coarse")) == "third"
    monkeypatch.setitem(RUNTIMES, "third", replace(third, obstacle=lambda *_: "needs another card"))
    with pytest.raises(MissingExtra, match="pip install a card"):
        build(model, precision="coarse")


def test_what_could_not_run_in_a_trial_is_asked_again_and_the_rest_is_not(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(choice, "WORTH_A_TRIAL", 1)
    tried: list[set[str]] = []
    times = {"other": 0.5, "native": 1.0, "eager": 2.0}
    monkeypatch.setattr(trial, "trial", lambda targets: tried.append(set(targets)) or {n: times[n] for n in targets})
    for refuse, chosen, count in (("has odd layers", "native", 1), ("has odd layers", "native", 1), ("", "other", 2)):
        add(monkeypatch, refuse=refuse, measured=True)
        monkeypatch.setattr(choice, "AUTO", ("other", "native", "eager"))
        assert build(model).traits.runtime == chosen and len(tried) == count
    assert tried == [{"native", "eager"}, {"other", "native", "eager"}]


def test_a_trial_is_remembered_for_the_kind_of_model_and_reads_no_weights(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("outrider.runtime.conversions.bits", lambda weight: pytest.fail("weights were read"))
    tried: list[set[str]] = []
    monkeypatch.setattr(trial, "trial", lambda targets: tried.append(set(targets)) or {"a": 1.0, "b": 2.0})

    def ask(model: Any, precision: str | None = None) -> bool:
        if not trial.remembered(model, ["a", "b"], precision):
            made = eager_target(model, max_slots=1)
            assert trial.compared(model, ["a", "b"], {"a": made, "b": made}, precision) == "a"
        return trial.remembered(model, ["a", "b"], precision) == {"a": 1.0, "b": 2.0}

    assert ask(model) and ask(LlamaForCausalLM(model.config).eval()) and len(tried) == 1  # other weights
    wider = LlamaForCausalLM(LlamaConfig(**{**model.config.to_dict(), "intermediate_size": 24})).eval()
    assert ask(wider) and len(tried) == 2
    assert ask(LlamaForCausalLM(model.config).eval().double()) and len(tried) == 3
    assert ask(model, "int8") and len(tried) == 4


def test_a_small_model_is_not_worth_a_trial(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    add(monkeypatch, measured=True)
    monkeypatch.setattr(trial, "trial", lambda targets: pytest.fail("tried"))
    assert taken(build(model)) == "eager"


def test_a_trial_times_all_and_leaves_the_slots_free(model: Any) -> None:
    targets = {name: eager_target(model, max_slots=1) for name in ("a", "b")}
    seconds = trial.trial(targets)
    assert set(seconds) == {"a", "b"} and min(seconds.values()) > 0
    assert all(t.free_slots == 1 for t in targets.values())


@pytest.mark.parametrize("context", [4, 9, 10, 11, 64, 66])
def test_a_trial_fits_into_a_short_context(model: Any, context: int) -> None:
    seconds = trial.trial({"a": eager_target(model, max_slots=1, max_context=context)})
    assert seconds["a"] > 0


@pytest.mark.parametrize("machine", ["riscv64", "s390x", "ppc64le"])
def test_native_says_where_it_has_no_kernels_and_another_runtime_is_taken(
    model: Any, machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    with pytest.raises(InputError, match=f"kernels for x86-64 and ARM64 processors, not for {machine}; use runtime"):
        check("native", None, CPU)
    assert "native" not in [runtime.name for runtime in choice._able(CPU, None, 1 << 30)]
    assert taken(build(model)) != "native"


@pytest.mark.parametrize("machine", ["x86_64", "AMD64", "arm64", "aarch64"])
def test_native_runs_on_the_processors_of_today(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    check("native", None, CPU)
