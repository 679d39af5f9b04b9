"""Near ties: what counts as one, how many are too many, and the reference that all runs are held against."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import poisson

from outrider.check.reference import TOGETHER, Answer, Job, Plain
from outrider.check.ties import Comparison, Precision, measure, no_noise, poisson_limit
from outrider.core.params import SamplingParams
from outrider.models import LoadedModel
from tests.runtime import test_architectures as zoo


def nobody(label: str, tokens: int) -> None:
    pass


def answer(tokens: list[int], margins: list[float], name: str = "a") -> Answer:
    job = Job(name, (1, 2), SamplingParams(max_new_tokens=len(tokens), seed=0))
    return Answer(job, tokens, np.array(margins), np.zeros((0, 0), np.int64), np.zeros((0, 0)))


NOISE = Precision(np.linspace(0, 5e-6, 1001), 1001)  # bound 1e-5


def compared(answers: list[Answer], *texts: list[int]) -> Comparison:
    comparison = Comparison(NOISE, answers)
    comparison.add("run", [(a, a.tokens) for a in answers], list(texts), steps=1)
    return comparison


def test_equal_texts_pass() -> None:
    comparison = compared([answer([5, 6, 7], [1.0, 1.0, 1.0])], [5, 6, 7])
    assert comparison.passed and not comparison.divergences and comparison.runs[0].identical == 1


def test_difference_at_a_clear_margin_refutes() -> None:
    comparison = compared([answer([5, 6, 7], [1.0, 2e-5, 1.0])], [5, 9, 9])
    assert not comparison.passed and comparison.refuting[0].position == 1


def test_difference_within_the_noise_is_a_tie_and_hides_what_follows() -> None:
    comparison = compared([answer([5, 6, 7], [1.0, 1e-6, 1.0])], [5, 9, 9])
    assert comparison.passed and comparison.ties == 1 and len(comparison.divergences) == 1


def test_without_noise_any_difference_refutes() -> None:
    """Even between tokens of equal logits: rows with the same bits choose the same of them."""
    one = answer([5, 6, 7], [1.0, 0.0, 1.0])
    comparison = Comparison(no_noise([one]), [one])
    comparison.add("run", [(one, one.tokens)], [[5, 6, 7]], steps=1)
    assert comparison.passed and "noise 0.0" in comparison.summary(False)
    comparison.add("other", [(one, one.tokens)], [[5, 9, 9]], steps=1)
    assert not comparison.passed and comparison.refuting[0].margin == 0.0


def test_ending_early_is_never_a_tie() -> None:
    assert not compared([answer([5, 6, 7], [0.0, 0.0, 0.0])], [5, 6]).passed
    assert not compared([answer([5, 6], [0.0, 0.0])], [5, 6, 7]).passed


def test_more_ties_than_predicted_refute() -> None:
    """Margins so close to the bound that a flip is a rare event, and yet every text flips there."""
    answers = [answer([5, 6], [1.0, 9e-6], str(i)) for i in range(20)]
    comparison = compared(answers, *([5, 9] for _ in answers))
    assert not comparison.refuting and comparison.expected_ties < 0.1
    assert comparison.ties == 20 > comparison.tie_limit and not comparison.passed


def test_one_tie_in_several_runs_counts_once() -> None:
    one = answer([5, 6], [1.0, 1e-6])
    comparison = compared([one], [5, 9])
    comparison.add("another run", [(one, one.tokens)], [[5, 9]], steps=1)
    assert comparison.ties == 1 and len(comparison.divergences) == 2


@pytest.mark.parametrize("mean", [0.0, 1e-3, 0.7, 12.0])
def test_limit_is_the_poisson_quantile(mean: float) -> None:
    assert poisson_limit(mean, 1e-4) == int(poisson.isf(1e-4, mean)) if mean else poisson_limit(mean, 1e-4) == 0


def test_reference_is_what_generate_says(tiny_llama: LoadedModel) -> None:
    plain = Plain(tiny_llama.model, 64)
    params = SamplingParams(max_new_tokens=30, ignore_eos=True, seed=0)
    said = plain.decode(Job("a", (3, 1, 4, 1, 5), params), nobody)
    want = tiny_llama.model.generate(
        torch.tensor([[3, 1, 4, 1, 5]]), max_new_tokens=30, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert said.tokens == want[0, 5:].tolist()
    noise = measure(plain, [said], nobody)
    assert 0 < noise.bound < 1e-3 and noise.positions == 30
    assert (said.margins > 0).all()
    assert torch.allclose(plain.rows((3, 1, 4, 1, 5), said.tokens).topk(2).values.diff(dim=1).abs().flatten().double(),
                          torch.from_numpy(said.margins), atol=1e-3)  # fmt: skip


def jobs(vocabulary: int) -> list[Job]:
    """Of unequal lengths and settings, more than go together."""
    rng, settings = np.random.default_rng(2), ({}, {"temperature": 1.0}, {"repetition_penalty": 1.3})
    return [
        Job(str(i), tuple(rng.integers(0, vocabulary, 1 + 5 * i % 23).tolist()),
            SamplingParams(max_new_tokens=9 + i % 4, ignore_eos=True, seed=i, **settings[i % 3]))
        for i in range(TOGETHER + 3)
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["llama", "qwen2-window", "mistral-window", "gemma2", "gpt2"])
def test_texts_that_go_together_say_what_each_says_alone(name: str) -> None:
    plain = Plain(zoo.build(name), 61)
    assert plain._can_pad
    told: list[int] = []
    together = plain.answers(jobs(61), lambda _, tokens: told.append(tokens))
    for job, one in zip(jobs(61), together, strict=True):
        alone = plain.decode(job, nobody)
        assert one.job == job and one.tokens == alone.tokens
        assert np.allclose(one.top_logits, alone.top_logits, atol=1e-4) and one.margins.shape == alone.margins.shape
    assert sum(told) == sum(len(one.tokens) for one in together)


def test_a_prompt_is_read_once_however_many_texts_begin_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.build("llama")
    plain, forward, widths = Plain(model, 61), model.forward, list[int]()

    def noted(input_ids: torch.Tensor, **given: Any) -> Any:
        widths.append(input_ids.shape[1])
        return forward(input_ids=input_ids, **given)

    monkeypatch.setattr(model, "forward", noted)
    plain.answers(jobs(61), nobody)
    read = len(widths)
    others = [replace(job, params=job.params.with_(temperature=0.8, seed=50 + i)) for i, job in enumerate(jobs(61) * 2)]
    said = plain.answers(others[3:], nobody)
    assert max(widths[:read]) > 1 and set(widths[read:]) == {1}
    assert [one.tokens for one in said] == [plain.decode(job, nobody).tokens for job in others[3:]]


def test_padding_that_is_seen_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.build("llama")
    plain, forward = Plain(model, 61), model.forward
    alone = [plain.decode(job, nobody).tokens for job in jobs(61)]
    monkeypatch.setattr(model, "forward", lambda attention_mask=None, **given: forward(**given))
    assert [one.tokens for one in plain.answers(jobs(61), nobody)] != alone


@pytest.mark.parametrize("name", ["llama-dynamic-rope"])
def test_models_that_padding_would_change_are_asked_one_by_one(name: str) -> None:
    plain = Plain(zoo.build(name), 61)
    assert not plain._can_pad and len(plain.answers(jobs(61)[:2], nobody)) == 2
