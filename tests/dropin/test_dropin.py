"""The transformers drop-in says what transformers' own `generate` says, and refuses by name what it cannot."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    StoppingCriteria,
    WatermarkingConfig,
)
from transformers.generation.streamers import BaseStreamer

import outrider
from outrider import dropin, methods
from outrider.control.fixed import Fixed
from outrider.core.errors import OutriderError
from outrider.core.protocols import Recipe
from outrider.core.records import Budget
from outrider.draft.forced import Forced
from outrider.methods import MethodInfo, Options, Parts
from outrider.verify.invariant import Invariant

VOCAB, CONTEXT, PAD, EOS = 61, 96, 0, 2
speculate = partial(outrider.generate, strict=True)
fixed_lookup = {"method": "prompt-lookup", "options": {"controller": "fixed", "budget": 8}}


@cache
def tiny(kind: str) -> Any:
    torch.manual_seed(3)
    ids = {"pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": EOS}
    if kind == "gpt2":
        model: Any = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=CONTEXT, initializer_range=0.3, **ids
            )
        )
    else:
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCAB, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, max_position_embeddings=CONTEXT, initializer_range=0.3, **ids,
            )
        )  # fmt: skip
    return model.eval()


@pytest.fixture(params=["llama", "gpt2"])
def model(request: pytest.FixtureRequest) -> Any:
    return tiny(request.param)


def prompt(width: int = 9, rows: int = 1) -> Tensor:
    return torch.randint(3, VOCAB, (rows, width), generator=torch.Generator().manual_seed(width + rows))


def padded_batch() -> dict[str, Tensor]:
    ids, mask = prompt(9, 3), torch.ones(3, 9, dtype=torch.long)
    for row, count in enumerate((4, 0, 7)):
        ids[row, :count], mask[row, :count] = PAD, 0
    return {"input_ids": ids, "attention_mask": mask}


class Favour(LogitsProcessor):
    """A caller's own processor: lifts the successor of the last token, by how long the text is."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        scores[torch.arange(len(scores)), (input_ids[:, -1] + 1) % VOCAB] += 0.2 * input_ids.shape[1]
        return scores


PROCESSING: dict[str, dict[str, Any]] = {
    "none": {},
    "repetition-penalty": {"repetition_penalty": 1.7},
    "no-repeat-ngram": {"no_repeat_ngram_size": 2},
    "bad-words": {"bad_words_ids": [[5], [7, 9], [11, 12, 13], [40, 41]]},
    "min-new-tokens": {"min_new_tokens": 15, "eos_token_id": list(range(2, 12))},
    "min-length": {"min_length": 18, "eos_token_id": list(range(2, 12))},
    "custom": {"logits_processor": [Favour()]},
    "custom-and-penalty": {"logits_processor": [Favour()], "repetition_penalty": 1.3, "renormalize_logits": True},
    "prompt-penalties": {"encoder_repetition_penalty": 1.5, "encoder_no_repeat_ngram_size": 2},
    "sequence-bias": {"sequence_bias": [[[8], 4.0], [[8, 9], 6.0]]},
    "forced-end": {"forced_eos_token_id": EOS},
    "suppressed": {"suppress_tokens": [4, 6], "begin_suppress_tokens": [20, 21]},
    "length-penalty": {"exponential_decay_length_penalty": (3, 1.2)},
    "watermark": {"watermarking_config": WatermarkingConfig(bias=3.0)},
    "by-row": {"prefix_allowed_tokens_fn": lambda row, ids: [x for x in range(VOCAB) if (x + len(ids)) % 3 != row]},
}


@pytest.mark.parametrize("processing", PROCESSING)
@pytest.mark.parametrize("inputs", [lambda: {"input_ids": prompt()}, padded_batch], ids=["one", "padded"])
def test_greedy_output_is_that_of_transformers(model: Any, inputs: Callable[[], Any], processing: str) -> None:
    call = {**inputs(), "max_new_tokens": 24, **PROCESSING[processing]}
    assert torch.equal(model.generate(**call, custom_generate=speculate, **fixed_lookup), model.generate(**call))


@pytest.mark.parametrize("method", ["plain", "draft-model", "accept-none"])
def test_every_method_serves_and_options_may_be_bound_or_given(model: Any, method: str) -> None:
    call = {**padded_batch(), "max_new_tokens": 20, "repetition_penalty": 1.2}
    bound = partial(outrider.generate, method=method, strict=True)
    options = {} if method == "plain" else {"controller": "fixed"}
    want = model.generate(**call)
    assert torch.equal(model.generate(**call, custom_generate=bound), want)
    assert torch.equal(model.generate(**call, custom_generate=bound, options=options), want)


def test_more_rows_than_slots_wait_in_line() -> None:
    model, call = copy.deepcopy(tiny("llama")), {**padded_batch(), "max_new_tokens": 12}
    assert torch.equal(model.generate(**call, custom_generate=speculate, max_slots=1), model.generate(**call))
    assert vars(model)[dropin.SESSION].outrider.target.slots == 1


@pytest.mark.parametrize("sampling", [
    {}, {"temperature": 0.7, "top_k": 12, "top_p": 0.9}, {"min_p": 0.05, "top_k": 0},
    {"typical_p": 0.8, "epsilon_cutoff": 0.01}, {"repetition_penalty": 1.3, "logits_processor": [Favour()]},
])  # fmt: skip
def test_a_torch_seed_gives_one_text_whatever_drafts(model: Any, sampling: dict[str, Any]) -> None:
    call = {**padded_batch(), "max_new_tokens": 24, "do_sample": True, "num_return_sequences": 2, **sampling}
    texts = []
    for method in ({"method": "plain"}, fixed_lookup, {"method": "accept-none"}):
        torch.manual_seed(11)
        texts.append(model.generate(**call, custom_generate=speculate, **method))
    assert torch.equal(texts[0], texts[1]) and torch.equal(texts[0], texts[2])
    following = model.generate(**call, custom_generate=speculate)
    assert not torch.equal(texts[0], following), "the next call goes on in the caller's random numbers"
    pairs = texts[0].view(3, 2, -1)
    assert not torch.equal(pairs[:, 0], pairs[:, 1]), "the sequences of one prompt are separate draws"


def test_sampled_tokens_follow_the_processors_distribution() -> None:
    """First tokens of 1,500 texts against the distribution that transformers' processors leave; 5 sigma a token."""
    model, count = tiny("llama"), 1500
    call = {"input_ids": prompt(), "do_sample": True, "temperature": 0.8, "top_k": 5, "max_new_tokens": 1}
    torch.manual_seed(0)
    out = model.generate(**call, custom_generate=speculate, num_return_sequences=count)
    row = model.generate(**call, return_dict_in_generate=True, output_scores=True).scores[0][0]
    p = row.softmax(-1)
    seen = torch.bincount(out[:, -1], minlength=VOCAB) / count
    assert ((seen - p).abs() <= 5 * (p * (1 - p) / count).sqrt()).all()


class StopAfter(StoppingCriteria):
    """Stops row by row at a length of the text that depends on its first token; remembers every length it saw."""

    def __init__(self, *lengths: int) -> None:
        self.lengths, self.asked = lengths, []

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        self.asked.append(input_ids.shape[1])
        limits = torch.tensor([self.lengths[int(row[0]) % len(self.lengths)] for row in input_ids])
        return input_ids.shape[1] >= limits


@pytest.fixture
def accept_all() -> Iterator[Callable[[Tensor, int], dict[str, Any]]]:
    """A method that replays known answers, so that whole runs of the right tokens are accepted in one step."""
    answers: dict[tuple[int, ...], list[int]] = {}

    def build(parts: Parts, _: Any) -> Recipe:
        drafter = Forced(lambda context: answers[tuple(context.prompt)], parts.target.vocab_size, decoys=1)
        return Recipe("replay", drafter, Invariant(), Fixed(Budget(24, 24)))

    def replay(texts: Tensor, width: int) -> dict[str, Any]:
        for row in texts.tolist():
            answers[tuple(token for token in row[:width] if token != PAD)] = row[width:]
        return {"method": "replay"}

    methods.register(MethodInfo("replay", "", "", "test", True, "nothing", Options, build))
    yield replay
    del methods.registry._METHODS["replay"]


@pytest.mark.parametrize("length", range(10, 24))
def test_a_criterion_stops_inside_an_accepted_run(length: int, accept_all: Any) -> None:
    model, ids = copy.deepcopy(tiny("llama")), prompt()
    full = model.generate(ids, max_new_tokens=30, eos_token_id=None)
    replay = accept_all(full, ids.shape[1])
    ours, theirs = StopAfter(length), StopAfter(length)
    call = {"input_ids": ids, "max_new_tokens": 30, "eos_token_id": None}
    got = model.generate(**call, custom_generate=speculate, **replay, stopping_criteria=[ours])
    assert torch.equal(got, model.generate(**call, stopping_criteria=[theirs]))
    assert ours.asked == theirs.asked == list(range(10, length + 1)), "asked once for every token, no further"


def test_a_processed_text_takes_fewer_forwards_than_tokens(accept_all: Any) -> None:
    model, ids = copy.deepcopy(tiny("llama")), prompt()
    call = {"input_ids": ids, "max_new_tokens": 40, "eos_token_id": None, "repetition_penalty": 1.2}
    want, forwards = model.generate(**call), []
    method = accept_all(want, ids.shape[1])
    model.generate(**call, custom_generate=speculate, **method)  # makes the runtime
    model.register_forward_hook(lambda *_: forwards.append(1))
    assert torch.equal(model.generate(**call, custom_generate=speculate, **method), want)
    assert len(forwards) == 4, "12 accepted tokens and one more a step; the prompt is in the cache"


@pytest.mark.parametrize("eos", [EOS, None, list(range(2, 30))])
def test_rows_that_stop_apart_end_as_in_transformers(model: Any, eos: Any) -> None:
    """With an end of text, stopped rows are padded; without one transformers lets them go on until the last stops."""
    call = {**padded_batch(), "max_new_tokens": 20, "eos_token_id": eos}
    apart = {"stopping_criteria": [StopAfter(14, 12, 17, 21, 11)]}
    assert torch.equal(model.generate(**call, **apart, custom_generate=speculate), model.generate(**call, **apart))


def test_a_criterion_reads_the_scores_it_asked_for() -> None:
    class Sure(StoppingCriteria):
        def __init__(self) -> None:
            self.seen: list[Tensor] = []

        def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
            self.seen.append(scores[-1])
            assert len(scores) == len(self.seen)
            return scores[-1].softmax(-1).max(-1).values > 0.9

    model, ours, theirs = tiny("llama"), Sure(), Sure()
    call = {"input_ids": prompt(), "max_new_tokens": 20, "return_dict_in_generate": True, "output_scores": True}
    got = model.generate(**call, custom_generate=speculate, stopping_criteria=[ours], **fixed_lookup)
    want = model.generate(**call, stopping_criteria=[theirs])
    assert torch.equal(got.sequences, want.sequences)
    torch.testing.assert_close(torch.stack(ours.seen), torch.stack(theirs.seen), rtol=1e-4, atol=1e-4)


class Recorder(BaseStreamer):
    def __init__(self) -> None:
        self.got: list[Any] = []

    def put(self, value: Tensor) -> None:
        self.got.append(value.tolist())

    def end(self) -> None:
        self.got.append("end")


@pytest.mark.parametrize("eos", [EOS, None, list(range(2, 30))])
@pytest.mark.parametrize("inputs", [lambda: {"input_ids": prompt()}, padded_batch], ids=["one", "padded"])
def test_the_streamer_gets_prompt_tokens_and_end_as_from_transformers(
    model: Any, inputs: Callable[[], Any], eos: Any, accept_all: Any
) -> None:
    model = copy.deepcopy(model)
    call = {**inputs(), "max_new_tokens": 20, "eos_token_id": eos, "stopping_criteria": [StopAfter(14, 12, 17, 21, 11)]}
    ours, theirs = Recorder(), Recorder()
    full = model.generate(**inputs(), max_new_tokens=20, eos_token_id=None)
    model.generate(**call, streamer=ours, custom_generate=speculate, **accept_all(full, 9))
    model.generate(**call, streamer=theirs)
    assert ours.got == theirs.got
    bound = Recorder()
    model.generate(**call, custom_generate=partial(speculate, streamer=bound))
    assert bound.got == theirs.got[1:], "bound to the function it is not seen by generate, which sends the prompt"


@pytest.mark.parametrize("asked", [{}, {"output_scores": True}, {"output_logits": True, "output_scores": True}])
@pytest.mark.parametrize("method", [fixed_lookup, {"method": "draft-model", "options": {"controller": "fixed"}}])
def test_returned_dictionaries_equal_those_of_transformers(model: Any, asked: Any, method: dict[str, Any]) -> None:
    call = {**padded_batch(), "max_new_tokens": 16, "repetition_penalty": 1.4, "return_dict_in_generate": True, **asked}
    call["eos_token_id"] = list(range(2, 12))
    got, want = model.generate(**call, custom_generate=speculate, **method), model.generate(**call)
    assert type(got) is type(want) and torch.equal(got.sequences, want.sequences)
    ended = torch.isin(want.sequences[:, 9:], torch.tensor(call["eos_token_id"])).cumsum(1)
    alive = torch.nn.functional.pad(ended, (1, 0))[:, :-1] == 0  # [B, T]
    for name in ("scores", "logits"):
        ours, theirs = getattr(got, name), getattr(want, name)
        assert (ours is None) == (theirs is None)
        if theirs is not None:
            assert len(ours) == len(theirs)
            for step, (a, b) in enumerate(zip(ours, theirs, strict=True)):
                assert a.shape == b.shape and a.dtype == b.dtype
                torch.testing.assert_close(a[alive[:, step]], b[alive[:, step]], rtol=1e-4, atol=1e-4)
    if got.scores:
        assert model.compute_transition_scores(got.sequences, got.scores).isfinite().all()


def test_settings_without_effect_do_not_refuse() -> None:
    """As in transformers: hidden states are only handed out in a dictionary, and a cache is an optimisation."""
    call = {"input_ids": prompt(), "max_new_tokens": 8, "output_hidden_states": True, "use_cache": False}
    model = copy.deepcopy(tiny("llama"))
    assert torch.equal(model.generate(**call, custom_generate=speculate), model.generate(**call))


def test_the_callers_model_is_as_before() -> None:
    model = copy.deepcopy(tiny("llama"))
    config, settings, weights = (
        model.config.to_dict(),
        model.generation_config.to_dict(),
        copy.deepcopy(model.state_dict()),
    )
    before = model.generate(**padded_batch(), max_new_tokens=16)
    model.generate(**padded_batch(), max_new_tokens=16, custom_generate=speculate, **fixed_lookup)
    assert torch.equal(model.generate(**padded_batch(), max_new_tokens=16), before)
    assert model.config.to_dict() == config and model.generation_config.to_dict() == settings
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())


def test_a_callers_error_comes_through_and_the_next_call_works() -> None:
    class Broken(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            if input_ids.shape[1] > 14:
                raise ZeroDivisionError("mine")
            return scores

    model = copy.deepcopy(tiny("llama"))
    call = {**padded_batch(), "max_new_tokens": 16}
    with pytest.raises(ZeroDivisionError, match="mine"):
        model.generate(**call, logits_processor=[Broken()], custom_generate=outrider.generate)
    assert torch.equal(model.generate(**call, custom_generate=speculate), model.generate(**call))


def test_a_distribution_without_tokens_is_a_named_error() -> None:
    with pytest.raises(OutriderError, match="no token is left"):
        tiny("llama").generate(prompt(), suppress_tokens=list(range(VOCAB)), custom_generate=outrider.generate)


def session(model: Any) -> Any:
    return vars(model).get(dropin.SESSION)


def test_the_runtime_is_kept_between_calls_and_grows_only_when_needed() -> None:
    model = copy.deepcopy(tiny("llama"))
    model.generate(prompt(), max_new_tokens=8, custom_generate=speculate)
    first = session(model)
    model.generate(prompt(11), max_new_tokens=30, custom_generate=speculate)
    assert session(model) is first
    model.generate(**padded_batch(), max_new_tokens=8, custom_generate=speculate)
    assert session(model) is not first and session(model).outrider.target.slots == 4
    model.double()
    call = {"input_ids": prompt(), "max_new_tokens": 8}
    assert torch.equal(model.generate(**call, custom_generate=speculate), model.generate(**call)), "a cast model"
    dropin.release(model)
    assert session(model) is None
    dropin.release(model)


def test_a_recipe_is_built_once_for_equal_options(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []
    build = methods.build
    monkeypatch.setattr(methods, "build", lambda name, *rest: built.append(name) or build(name, *rest))
    model = copy.deepcopy(tiny("llama"))
    for options in ({"budget": 4}, {"budget": 4}, {"budget": 5}, {"budget": 4}):
        model.generate(prompt(), max_new_tokens=4, custom_generate=speculate, method="prompt-lookup", options=options)
    assert built == ["plain", "prompt-lookup", "prompt-lookup"]


def test_the_session_dies_with_the_model_and_copies_begin_without_one() -> None:
    model = copy.deepcopy(tiny("llama"))
    model.generate(prompt(), max_new_tokens=8, custom_generate=speculate, method="draft-model")
    assert session(copy.deepcopy(model)) is None
    assert session(pickle.loads(pickle.dumps(model))) is None
    model_ref, cache_ref = weakref.ref(model), weakref.ref(session(model).outrider.target)
    del model
    gc.collect()
    assert model_ref() is None and cache_ref() is None


def test_threads_wait_for_each_other() -> None:
    model, call, out = copy.deepcopy(tiny("llama")), {**padded_batch(), "max_new_tokens": 16}, []
    want = model.generate(**call)
    work = [
        threading.Thread(target=lambda: out.append(model.generate(**call, custom_generate=speculate))) for _ in range(3)
    ]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()
    assert len(out) == 3 and all(torch.equal(one, want) for one in out)


@pytest.mark.slow
def test_the_embedded_model_speaks_as_before() -> None:
    loaded = outrider.load("smollm2").loaded
    model, tokenizer = loaded.model, loaded.tokenizer
    tokenizer.padding_side = "left"
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    texts = ["The capital of France is", "def add(a, b):\n    return", "One, two, three, one, two, three, one,"]
    inputs = tokenizer(texts, return_tensors="pt", padding=True)
    for processing in ({}, {"repetition_penalty": 1.2}):
        call = {**inputs, "max_new_tokens": 48, "do_sample": False, **processing}
        assert torch.equal(model.generate(**call, custom_generate=speculate), model.generate(**call))
