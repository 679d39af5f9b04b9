"""The whole loop on models with recurrent layers: every drafter gives plain's greedy text, and so does a restart."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import outrider
from outrider.api import Outrider
from outrider.check import bugs
from outrider.check.gate import Size, check
from outrider.core.generation import Generation
from outrider.core.params import SamplingParams
from outrider.models import load_model
from outrider.runtime.eager.backend import EagerBackend
from outrider.runtime.slots import SlotTarget
from tests.drafters import drafter, some_text
from tests.runtime.recurrent.families import build

PROMPTS = [[1, 2, 3, 4, 5, 1, 2, 3], [9, 8, 7], [5], [6, 7, 6, 7, 6]]
FAMILIES = ["falcon-h1", "lfm2"]


@cache
def engine(name: str) -> Outrider:
    """Two slots for four prompts: some wait, and slots are used again."""
    return Outrider(load_model(build(name)), "plain", strict=True, limits={"max_slots": 2})


def run(made: Outrider, method: str, options: dict[str, Any] | None = None) -> list[Generation]:
    params = SamplingParams(max_new_tokens=24, ignore_eos=True)
    recipe = made.recipe(method, options)
    handles = [made.engine.submit(prompt, params, recipe) for prompt in PROMPTS]
    return [handle.result() for handle in handles]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    ("method", "options"),
    [("mix", {}), ("suffix", {}), ("prompt-lookup", {}), ("draft-model", {"layers": 1}), ("stree", {"layers": 1})],
)
def test_greedy_text_is_plains(name: str, method: str, options: dict[str, Any]) -> None:
    made = engine(name)
    target = made.target
    assert isinstance(target, SlotTarget) and isinstance(target.backend, EagerBackend)
    plain = run(made, "plain")
    drafted = run(made, method, options)
    assert [one.token_ids for one in drafted] == [one.token_ids for one in plain]
    assert sum(one.stats.accepted for one in drafted) > 0


@pytest.mark.parametrize("name", FAMILIES)
def test_a_sequence_that_is_put_back_goes_on_with_the_same_text(name: str) -> None:
    made = engine(name)
    want = [one.token_ids for one in run(made, "suffix")]
    params = SamplingParams(max_new_tokens=24, ignore_eos=True)
    handles = [made.engine.submit(prompt, params, made.recipe("suffix")) for prompt in PROMPTS]
    for step in range(200):
        if step in (1, 2, 4) and made.engine.running:
            made.engine.roster.put_back(made.engine.running[0])
        if not made.engine.step():
            break
    got = [handle.result() for handle in handles]
    assert [one.token_ids for one in got] == want and sum(one.stats.preemptions for one in got) > 0


@pytest.mark.parametrize("name", FAMILIES)
def test_the_next_answer_of_a_conversation_does_not_run_the_past_again(name: str) -> None:
    made = engine(name)
    params = SamplingParams(max_new_tokens=8, ignore_eos=True)
    past = [3, 4, 5, 9, 11, 12]
    first = made.engine.submit(past, params).result()
    text = [*past, *first.token_ids, 17, 18]
    again = made.engine.submit(text, params).result()
    fresh = Outrider(load_model(build(name)), "plain", strict=True, limits={"max_slots": 1})
    alone = fresh.engine.submit(text, params).result()
    assert again.token_ids == alone.token_ids
    assert again.stats.cached_tokens == len(past) + len(first.token_ids) - 2 and not alone.stats.cached_tokens


@pytest.mark.parametrize("name", ["mamba2", "lfm2", "qwen3-next", "mamba", "minimax", "recurrent-gemma", "rwkv"])
def test_generate_of_transformers_gives_the_same_text(name: str) -> None:
    model, prompt = build(name), torch.tensor([[5, 9, 3, 5, 9, 3]])
    settings: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": -1}
    plain = model.generate(prompt, **settings)
    assert torch.equal(model.generate(prompt, **settings, custom_generate=outrider.generate), plain)


def test_engines_of_one_family_in_two_threads_do_not_meet() -> None:
    """What stands in for a family's functions is there for one engine, while its forward runs, and for nobody else."""
    params = SamplingParams(max_new_tokens=16, ignore_eos=True)
    models = [copy.deepcopy(build("mamba2")) for _ in range(3)]
    made = [Outrider(load_model(model), "suffix", strict=True, limits={"max_slots": 2}) for model in models[:2]]

    def texts(one: Outrider) -> list[Any]:
        return [one.engine.submit(prompt, params).result().token_ids for prompt in PROMPTS]

    want = texts(made[0])
    other, prompt = models[2], torch.tensor([[5, 9, 3, 5, 9, 3]])
    with ThreadPoolExecutor(2) as threads, torch.no_grad():
        plain, jobs = other(prompt).logits, [threads.submit(texts, one) for one in made]
        while not all(job.done() for job in jobs):
            assert torch.equal(other(prompt).logits, plain)
    assert [job.result() for job in jobs] == [want, want]


def test_a_trained_drafter_reads_the_hidden_states_of_a_hybrid(tmp_path: Path) -> None:
    made = engine("lfm2")
    text = some_text(made.loaded, tmp_path / "text")
    folder = drafter("medusa", made.loaded, text, tmp_path / "drafter", steps=2)
    drafted = run(made, "medusa", {"drafter": str(folder)})
    assert [one.token_ids for one in drafted] == [one.token_ids for one in run(made, "plain")]
    assert sum(one.stats.drafted for one in drafted) > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("method", ["mix", "suffix", "stree", "draft-model"])
def test_the_gate_passes_hybrids_and_catches_what_is_planted(name: str, method: str) -> None:
    options = {} if method in ("mix", "suffix") else {"layers": 1}
    planted = bugs.named(bugs.ALL) if method == "draft-model" else ()
    size = Size(3, 24, 20, 5, 16, 16, 60, 3, thorough=False)
    report = check(load_model(build(name, 256)), method, options, bugs=planted, size=size)
    assert report.verdict == "same output", [part.summary for part in report.parts]
    assert all(bug.caught_by for bug in report.bugs)
