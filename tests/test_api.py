"""What a user holds, on the embedded model: same output for every method, text in and text out, clear errors."""

from __future__ import annotations

import asyncio

import pytest
import torch

import outrider
from outrider.api import Outrider
from outrider.core.errors import InputError, UnknownName
from outrider.core.generation import FinishReason, Generation
from outrider.core.records import NO_NEEDS, Needs
from outrider.runtime import choice
from outrider.runtime.eager.backend import EagerBackend
from outrider.runtime.slots import SlotTarget

PROMPTS = [
    "Repeat this twice: the quick brown fox jumps over the lazy dog.",
    "Name three rivers.",
    "Write the numbers from one to ten in words, then again.",
]
METHODS = ["prompt-lookup", "draft-model", "accept-none"]


@pytest.fixture(scope="module")
def engine(smollm2) -> Outrider:
    return Outrider(smollm2, strict=True, limits={"max_context": 512})


@pytest.fixture(scope="module")
def chats(engine: Outrider) -> list[list[int]]:
    return [engine.encode_chat([{"role": "user", "content": text}]) for text in PROMPTS]


def test_greedy_output_is_transformers_own_with_every_method(engine: Outrider, chats, smollm2) -> None:
    want = []
    for ids in chats:
        out = smollm2.model.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False)
        want.append(out[0, len(ids) :].tolist())
    for method in ["plain", *METHODS]:
        assert [g.token_ids for g in engine.generate(chats, method=method, max_new_tokens=24)] == want, method


def test_seeded_output_is_the_same_with_every_invariant_method(engine: Outrider, chats) -> None:
    settings = {"max_new_tokens": 20, "temperature": 0.8, "top_p": 0.95, "seed": 5}
    plain = engine.generate(chats, method="plain", **settings)
    lookup = engine.generate(chats[::-1], method="prompt-lookup", **settings)[::-1]
    alone = [engine.generate([ids], method="accept-none", **settings)[0] for ids in chats]
    assert [g.token_ids for g in plain] == [g.token_ids for g in lookup] == [g.token_ids for g in alone]


def generated(engine: Outrider, method: str, options: dict, prompt: list[int], **sampling) -> Generation:
    """By a method with options of its own on the same target: another one takes seconds to make."""
    return engine.engine.submit(prompt, engine._params(None, sampling), engine.recipe(method, options)).result()


def test_copying_is_accepted(engine: Outrider) -> None:
    text = ("one two three four five six seven eight nine ten " * 4).strip()
    result = generated(engine, "mix", {"size": "budget", "budget": 8}, engine.encode(text), max_new_tokens=32)
    assert result.stats.mean_accepted > 4  # a floor: a wrong draft position would leave it near 1
    assert result.token_ids == engine.generate([text], method="plain", max_new_tokens=32)[0].token_ids


def test_the_first_layers_draft_better_than_chance(engine: Outrider, chats) -> None:
    options = {"controller": "fixed", "budget": 4, "verifier": "invariant", "layers": 28}
    drafted = Outrider(engine.loaded, "draft-model", options, {"max_context": 256}, runtime="eager")
    results = drafted.generate(chats, max_new_tokens=24)
    accepted = sum(g.stats.accepted for g in results)
    assert accepted > 12  # a floor: wrong positions or a wrong cache in the draft would leave none


def test_chat_stream_and_generate_agree(engine: Outrider) -> None:
    message = [{"role": "user", "content": PROMPTS[1]}]
    whole = engine.chat(message, max_new_tokens=16)
    stream = engine.stream(message, max_new_tokens=16)
    assert "".join(stream) == whole.text == stream.generation.text
    assert engine.chat(PROMPTS[1], max_new_tokens=16).token_ids == whole.token_ids


def test_async_streams_share_the_engine(engine: Outrider, chats) -> None:
    want = [g.text for g in engine.generate(chats, max_new_tokens=12)]

    async def read(ids) -> str:
        return "".join([piece async for piece in engine.astream(ids, max_new_tokens=12)])

    async def everything() -> list[str]:
        return await asyncio.gather(*(read(ids) for ids in chats))

    assert asyncio.run(everything()) == want


def test_a_cancelled_async_stream_leaves_the_engine_usable(engine: Outrider, chats) -> None:
    async def leave() -> None:
        async for _ in engine.astream(chats[0], max_new_tokens=40):
            break
        task = asyncio.create_task(anext(engine.astream(chats[1], max_new_tokens=40)))  # type: ignore[arg-type]
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(leave())
    assert engine.generate([chats[0]], max_new_tokens=3)[0].stats.new_tokens == 3
    assert engine.target.free_slots == 8


def test_submit_step_and_cancel_with_parameters_and_method_of_their_own(engine: Outrider) -> None:
    params = outrider.SamplingParams(max_new_tokens=20)
    one = engine.submit(PROMPTS[0], params, method="plain")
    two = engine.submit(PROMPTS[1], params, max_new_tokens=3)
    engine.step()
    one.cancel()
    assert two.result().stats.new_tokens == 3
    assert one.result().finish_reason is FinishReason.CANCELLED


def test_stop_strings_end_the_text_before_them(engine: Outrider) -> None:
    free = engine.chat(PROMPTS[2], max_new_tokens=30).text
    stop = free[len(free) // 2 : len(free) // 2 + 4]
    assert engine.chat(PROMPTS[2], max_new_tokens=30, stop=stop).text == free[: free.index(stop)]


def test_an_expected_text_is_drafted_from(engine: Outrider, chats) -> None:
    plain = engine.generate(chats[2:], method="plain", max_new_tokens=40)[0]
    method = "predicted", {"controller": "fixed", "budget": 8}
    for expected in (plain.text, plain.token_ids):
        result = generated(engine, *method, chats[2], max_new_tokens=40, prediction=expected)
        assert result.token_ids == plain.token_ids
        assert result.stats.mean_accepted > 6  # nearly all of the eight, and the target's own
    assert generated(engine, *method, chats[2], max_new_tokens=8, prediction="").stats.drafted == 0


def test_words_can_be_banned_by_text(engine: Outrider) -> None:
    free = engine.chat(PROMPTS[1], max_new_tokens=16).text
    word = next(w for w in free.split() if w.isalpha() and len(w) > 3)
    assert word not in engine.chat(PROMPTS[1], max_new_tokens=16, bad_words=[word]).text.split()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda e: e.generate([""]), "empty"),
        (lambda e: e.generate([]), "no prompts"),
        (lambda e: e.generate(["x"], temperature=-1), "temperature"),
        (lambda e: e.generate(["x"], top_p=1.5), "top_p"),
        (lambda e: e.generate(["x"], tempreature=1), "unknown sampling parameter tempreature"),
        (lambda e: e.generate(["word " * 600]), "context"),
        (lambda e: e.generate([object()]), "prompt"),
        (lambda e: e.generate(None), "cannot use None as a prompt"),
        (lambda e: e.generate(5), "cannot use 5 as a prompt"),
        (lambda e: e.generate(["x", None]), "prompt 2 of 2: cannot use None"),
        (lambda e: e.generate(b"x"), "bytes; decode them"),
        (lambda e: e.generate(["x", b"x"]), "prompt 2 of 2: .*bytes; decode them"),
        (lambda e: e.generate(["x\ud800"]), "the prompt has half a surrogate pair"),
        (lambda e: e.stream(None), "cannot use None as a prompt"),
        (lambda e: e.submit(5), "cannot use 5 as a prompt"),
        (lambda e: e.submit("x", prediction="\ud800"), "the prediction has half a surrogate pair"),
        (lambda e: e.submit("x", prediction=b"x"), "prediction=b'x'"),
        (lambda e: e.submit("x", stop_token_ids=b"x"), "stop_token_ids=b'x'"),
        (lambda e: e.submit("x", bad_words=["a\udc00"]), "a bad word has half a surrogate pair"),
        (lambda e: e.submit("x", bad_words="no"), "bad_words='no'"),
        (lambda e: e.submit("x", bad_words=5), "bad_words=5"),
        (lambda e: e.submit("x", bad_words=["a", 5]), "bad_words=5"),
        (lambda e: e.submit("x", bad_words=[b"no"]), "bad_words=b'no'"),
        (lambda e: e.submit("x", {"temperature": 1}), "params is of type dict; give SamplingParams"),
        (lambda e: e.submit("x", [outrider.SamplingParams()]), "params is of type list; .* goes to generate"),
        (lambda e: e.generate(["x"], [outrider.SamplingParams()] * 2), "prompts is 1 and that of params 2; give one"),
        (lambda e: e.generate(["x", "y"], []), "prompts is 2 and that of params 0; give one"),
        (lambda e: e.generate(["x"], [{"temperature": 1}]), "params is of type dict"),
        (lambda e: e.generate(["x"], 5), "params is of type int"),
        (lambda e: e.chat([]), "no chat messages"),
        (lambda e: e.chat(None), "cannot use None as chat messages"),
        (lambda e: e.chat([{"role": "user"}]), "chat message 1 has no content"),
        (lambda e: e.generate([[{"role": "user"}]]), "chat message 1 has no content"),
        (lambda e: e.chat([{"role": "user", "content": [{"type": "image_url"}]}]), "of type 'image_url'"),
        (lambda e: e.chat([{"role": "assistant", "tool_calls": [{}]}]), "chat template of .* refuses these messages"),
        (lambda e: e.stream("x", n=2), "one sample"),
        (lambda e: e.generate(["x"], method="magic"), "known methods"),
    ],
)
def test_bad_input_names_itself_and_the_remedy(engine: Outrider, call, message: str) -> None:
    with pytest.raises((InputError, UnknownName), match=message) as caught:
        call(engine)
    assert "\n" not in str(caught.value)


def test_each_prompt_has_its_parameters_and_keywords_change_all_of_them(engine: Outrider) -> None:
    params = [outrider.SamplingParams(max_new_tokens=count, seed=count) for count in (2, 5, 3)]
    results = engine.generate(PROMPTS, params, ignore_eos=True)
    assert [(g.stats.new_tokens, g.seed) for g in results] == [(2, 2), (5, 5), (3, 3)]
    results = engine.generate(PROMPTS[:2], tuple(params[:2]), ignore_eos=True, n=2, max_new_tokens=1)
    assert [(g.stats.new_tokens, g.seed, g.sample) for g in results] == [(1, 2, 0), (1, 2, 1), (1, 5, 0), (1, 5, 1)]


def test_conversations_and_lists_of_text_parts_are_prompts(engine: Outrider, chats) -> None:
    message = {"role": "user", "content": [{"type": "text", "text": PROMPTS[1]}]}
    assert engine.encode([message]) == engine.encode_chat([message]) == engine.encode_chat(PROMPTS[1]) == chats[1]
    want = engine.chat(PROMPTS[1], max_new_tokens=6).token_ids
    assert [g.token_ids for g in engine.generate([message], max_new_tokens=6)] == [want]
    both = engine.generate([[message], [message, {"role": "user", "content": "Why?"}]], max_new_tokens=6)
    assert both[0].token_ids == want and len(both) == 2


def test_a_draft_with_another_vocabulary_drafts_through_text(engine: Outrider, tmp_path) -> None:
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(engine.loaded.model.name_or_path)
    tokenizer.add_tokens(["<brand-new>"])
    config = LlamaConfig(vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                         num_attention_heads=2)  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    recipe = engine.recipe("draft-model", {"draft": str(tmp_path), "controller": "fixed", "budget": 3})
    params, prompt = outrider.SamplingParams(max_new_tokens=8), engine.encode("The rain in Spain")
    result = engine.engine.submit(prompt, params, recipe).result()
    assert result.stats.drafted > 0 and result.stats.drafter_failures == 0
    assert result.token_ids == engine.generate(["The rain in Spain"], params, method="plain")[0].token_ids


def test_the_public_names_are_there() -> None:
    for name in outrider.__all__:
        assert getattr(outrider, name) is not None
    with pytest.raises(AttributeError):
        outrider.nonsense  # noqa: B018


def test_a_target_is_told_what_its_methods_need_before_the_first_text(smollm2, monkeypatch) -> None:
    told = []

    class Preparing(SlotTarget):
        def prepare(self, *given: object) -> None:
            told.append(given)

    build = lambda model, runtime, precision, **limits: Preparing(EagerBackend(model), **limits)  # noqa: E731
    monkeypatch.setattr(choice, "build", build)
    engine = Outrider(smollm2, "plain", limits={"max_context": 256})
    assert told == [((), NO_NEEDS)]  # plain decoding needs nothing, in passes of any number of sequences
    told.clear()
    layers = engine.recipe("eagle3", {"budget": 4}).drafter.needs.hidden
    assert len(layers) == 3 and told == [((), Needs(hidden=layers))]
    engine.prepare([64])
    assert told[1:] == [([64], Needs(hidden=layers))]
