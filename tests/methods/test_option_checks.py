"""Nonsense costs no model load: every option of every method, and every place that is named, is looked at before."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

import outrider
from outrider import methods
from outrider.core.errors import InputError, OutriderError
from outrider.models.drafts import CARD, DraftCard, write_drafter

NONSENSE: dict[str, list[Any]] = {
    "int": [-3, "many", 2.5, math.nan, True, None], "float": [-0.5, "many", math.nan, math.inf, None],
    "bool": ["perhaps", 2, None], "str": ["/no/such/place", {"a": 1}, None],
}  # fmt: skip
ZERO_MEANS_SOMETHING = {"layers", "keep", "memory_bytes"}
OPTIONS = [(info.name, option) for info in methods.table() for option in info.option_list]


@pytest.fixture(autouse=True)
def no_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_model(*_: Any, **__: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("outrider.runtime.ranks.opening.open_model", load_model)


@pytest.mark.parametrize(("method", "option"), OPTIONS, ids=lambda given: getattr(given, "name", given))
def test_every_option_of_every_method_refuses_nonsense_before_a_model_is_loaded(
    method: str, option: methods.Option
) -> None:
    values = NONSENSE.get(option.type.partition("|")[0], ["nonsense", 7])
    if option.type.startswith("int") and option.name not in ZERO_MEANS_SOMETHING:
        values = [*values, 0]
    for value in values:
        with pytest.raises(OutriderError) as refusal:
            outrider.load(method=method, options={option.name: value})
        assert option.name in str(refusal.value) or str(value) in str(refusal.value)


def test_good_options_reach_the_load() -> None:
    with pytest.raises(AssertionError, match="a model was loaded"):
        outrider.load(method="mix", options={"budget": "auto", "depth": 4.0, "parts": "suffix,draft-model"})


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("mix", {"budget": 0}, "option budget is 0; use 1 to 4096, auto, or the method plain for none"),
        ("suffix", {"budget": 0}, "option budget is 0; use 1 to 4096, or the method plain for none"),
        ("mix", {"budget": "atuo"}, "it must be a whole number or auto"),
        ("mix", {"parts": "suffix,sufix"}, "unknown method 'sufix'; did you mean suffix"),
        ("mix", {"parts": "suffix,plain"}, "name different methods that draft"),
        ("mix", {"parts": "suffix,medusa"}, "no medusa drafter is kept or shipped for any model; train one"),
        ("mix", {"parts": "draft-model,suffix", "verifier": "block"}, "use invariant, recursive"),
        ("mix", {"memory_bytes": 5000}, "part suffix: option memory_bytes"),
        ("prompt-lookup", {"min_ngram": 5}, "option min_ngram is 5; use 1..max_ngram"),
        ("specinfer", {"expansion": "3,0"}, "option expansion is '3,0'"),
        ("del", {"exits": "0,4"}, "option exits is '0,4'"),
        ("stand", {"memory_bytes": 5000}, "the least that works is"),
        ("lookahead", {"memory_bytes": 100}, "a pool of 100 bytes holds no n-grams"),
        ("suffix", {"scope": "privat"}, "did you mean private"),
        ("suffix", {"bugdet": 3}, "did you mean budget"),
        ("medusa", {}, "no medusa drafter is kept or shipped"),
        ("kangaroo", {}, "no kangaroo drafter is kept or shipped"),
    ],
)
def test_a_refusal_names_the_remedy(method: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OutriderError) as refusal:
        outrider.load(method=method, options=options)
    assert message in str(refusal.value)


def test_a_folder_that_is_no_drafter_store_or_draft_is_refused(tmp_path: Path) -> None:
    write_drafter(tmp_path / "medusa", {}, DraftCard("x", "y", (), kind="medusa"))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / CARD).write_text(json.dumps([1]))
    (tmp_path / "empty").mkdir()
    for method, option, folder, message in [
        ("hydra", "drafter", "medusa", "holds a drafter of kind medusa, not hydra"),
        ("hydra", "drafter", "empty", "drafter.json is missing"),
        ("hydra", "drafter", "broken", "cannot be read"),
        ("draft-model", "draft", "medusa", "holds a drafter of kind medusa"),
        ("draft-model", "draft", "empty", "has no config.json"),
        ("omnidraft-ngram", "draft", "none.gguf", "no file"),
        ("retrieval", "store", "empty", "empty"),
        ("mix", "store", "empty", "empty"),
        ("rasd", "store", "empty", "empty"),
        ("aded", "corpus", "empty", "cannot be read"),
    ]:
        with pytest.raises(OutriderError) as refusal:
            outrider.load(method=method, options={option: str(tmp_path / folder)})
        assert message in str(refusal.value), (method, option)


@pytest.mark.parametrize("place", [".", "missing/memory", "file/memory"])
def test_a_memory_that_cannot_be_written_is_refused(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(InputError, match="is a folder|does not exist"):
        outrider.load(memory=tmp_path / place)


def test_a_memory_in_a_folder_without_the_right_to_write_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(**_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("outrider.core.files.tempfile.TemporaryFile", denied)  # a chmod would not stop root
    with pytest.raises(InputError, match=r"cannot be written \(Permission denied\); choose another file"):
        outrider.load(memory=tmp_path / "memory")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"runtime": "natve"}, "did you mean native"),
        ({"precision": "in8"}, "did you mean int8"),
        ({"runtime": "graphs", "device": "cpu"}, "needs a CUDA GPU"),
        ({"device": "cpuu"}, "no device"),
    ],
)
def test_a_runtime_that_cannot_run_here_is_refused(more: dict[str, str], message: str) -> None:
    with pytest.raises(OutriderError, match=message):
        outrider.load(**more)
