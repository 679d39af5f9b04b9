"""OpenAI's client drives the chat and completion routes, and gets what the engine says."""

from __future__ import annotations

import math
from collections.abc import Iterator

import openai
import pytest

from outrider.api import Outrider
from tests.serve.conftest import Served

HELLO = [{"role": "user", "content": "Say something."}]


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0) as made:
        yield made


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_chat_is_the_engines_text_whole_and_streamed(
    client: openai.OpenAI, engine: Outrider, temperature: float
) -> None:
    asked = {"model": "small", "messages": HELLO, "temperature": temperature, "seed": 11, "max_completion_tokens": 24}
    wanted = engine.chat(HELLO, temperature=temperature, seed=11, max_new_tokens=24)
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].message.content == wanted.text
    assert whole.usage.completion_tokens == len(wanted.token_ids) and whole.usage.prompt_tokens > 3
    assert whole.timings["predicted_n"] == len(wanted.token_ids) and whole.timings["steps"] > 0
    pieces, finish = [], None
    for chunk in client.chat.completions.create(**asked, stream=True):
        pieces.append(chunk.choices[0].delta.content or "")
        finish = chunk.choices[0].finish_reason or finish
    assert "".join(pieces) == wanted.text and finish == whole.choices[0].finish_reason


def test_several_samples_stream_side_by_side(client: openai.OpenAI, engine: Outrider) -> None:
    wanted = engine.generate([engine.encode_chat(HELLO)], n=3, temperature=1.0, seed=3, max_new_tokens=12)
    asked = {"model": "small", "messages": HELLO, "n": 3, "seed": 3, "max_tokens": 12}
    texts, usage = ["", "", ""], None
    for chunk in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
        usage = chunk.usage or usage
    assert texts == [generation.text for generation in wanted]
    assert usage.completion_tokens == sum(len(generation.token_ids) for generation in wanted)
    whole = client.chat.completions.create(**asked)
    assert [choice.message.content for choice in whole.choices] == texts


def test_logprobs_are_those_of_the_engine(client: openai.OpenAI, engine: Outrider) -> None:
    (wanted,) = engine.generate([engine.encode_chat(HELLO)], max_new_tokens=6, logprobs=2)
    found = client.chat.completions.create(
        model="small", messages=HELLO, temperature=0, max_tokens=6, logprobs=True, top_logprobs=2
    )
    content = found.choices[0].logprobs.content
    assert [round(one.logprob, 4) for one in content] == [round(one.raw, 4) for one in wanted.logprobs]
    assert all(len(one.top_logprobs) == 2 and one.top_logprobs[0].logprob >= one.top_logprobs[1].logprob
               for one in content)  # fmt: skip
    assert b"".join(bytes(one.bytes) for one in content).decode("utf-8", "replace") == wanted.text
    old = client.completions.create(model="small", prompt=engine.encode_chat(HELLO), temperature=0, max_tokens=6,
                                    logprobs=2).choices[0]  # fmt: skip
    assert old.text == wanted.text and len(old.logprobs.tokens) == 6
    assert math.isclose(old.logprobs.token_logprobs[0], wanted.logprobs[0].raw, abs_tol=1e-4)


def test_several_prompts_continue_and_an_echo_begins_with_the_prompt(client: openai.OpenAI, engine: Outrider) -> None:
    prompts = ["The quick brown", "One, two,"]
    wanted = engine.generate([engine.encode(one) for one in prompts], max_new_tokens=8)
    found = client.completions.create(model="small", prompt=prompts, temperature=0, max_tokens=8, echo=True)
    assert [choice.text for choice in found.choices] == [p + w.text for p, w in zip(prompts, wanted, strict=True)]
    streamed = ["", ""]
    for chunk in client.completions.create(model="small", prompt=prompts, temperature=0, max_tokens=8, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == [generation.text for generation in wanted]


def test_the_fields_of_other_servers_do_what_they_do_there(client: openai.OpenAI, engine: Outrider) -> None:
    prompt = engine.encode("The quick brown")
    (plain,) = engine.generate([prompt], max_new_tokens=12)
    allowed = plain.token_ids[:3]

    def ask(**extra: object) -> openai.types.CompletionChoice:
        return client.completions.create(
            model="small", prompt=prompt, temperature=0, max_tokens=12, extra_body={"return_token_ids": True, **extra}
        ).choices[0]

    assert set(ask(allowed_token_ids=allowed, ignore_eos=True).token_ids) <= set(allowed)
    cut = ask(stop_token_ids=[plain.token_ids[4]])
    assert (
        cut.token_ids == plain.token_ids[:5] and cut.stop_reason == plain.token_ids[4] and cut.finish_reason == "stop"
    )
    word = plain.text[len(plain.text) // 2 :][:3]
    kept = ask(stop=[word], include_stop_str_in_output=True)
    assert kept.text == plain.text[: plain.text.index(word) + 3] and kept.stop_reason == word
    assert ask(stop=[word]).text == plain.text[: plain.text.index(word)]
    assert plain.token_ids[0] not in ask(logit_bias={str(plain.token_ids[0]): -100}).token_ids[:1]
    origins = ask(outrider={"origins": True}, method="plain").outrider["origins"]
    assert len(origins) == 12 and {one["drafter"] for one in origins} == {""}


def test_a_prediction_is_counted(client: openai.OpenAI, engine: Outrider) -> None:
    answer = engine.chat(HELLO, max_new_tokens=20).text
    found = client.chat.completions.create(
        model="small", messages=HELLO, temperature=0, max_tokens=20,
        prediction={"type": "content", "content": answer}, extra_body={"method": "predicted"},
    )  # fmt: skip
    details = found.usage.completion_tokens_details
    assert found.choices[0].message.content == answer
    assert details.accepted_prediction_tokens > 10 and found.timings["steps"] < 20
    assert details.rejected_prediction_tokens >= 0


def test_faults_are_the_clients_errors(client: openai.OpenAI) -> None:
    ask = client.chat.completions.create
    with pytest.raises(openai.NotFoundError, match="no model"):
        ask(model="other", messages=HELLO)
    with pytest.raises(openai.BadRequestError, match="known methods"):
        ask(model="small", messages=HELLO, extra_body={"method": "nonsense"})
    with pytest.raises(openai.BadRequestError) as fault:
        ask(model="small", messages=HELLO, temperature=-1)
    assert fault.value.param == "temperature" and fault.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError, match="context"):
        client.completions.create(model="small", prompt=[5] * 600)
    with pytest.raises(openai.APIStatusError) as fault501:
        client.embeddings.create(model="small", input="x")
    assert fault501.value.status_code == 501


def test_the_client_lists_models(client: openai.OpenAI) -> None:
    assert [one.id for one in client.models.list()] == ["small"]
    assert client.models.retrieve("small").id == "small"


def test_log_probabilities_of_the_prompt_come_with_an_echo(client: openai.OpenAI, engine: Outrider) -> None:
    prompt = engine.encode("The quick brown fox")
    (wanted,) = engine.generate([prompt], max_new_tokens=2, logprobs=1, prompt_logprobs=1)
    found = client.completions.create(
        model="small", prompt=prompt, temperature=0, max_tokens=2, echo=True, logprobs=1,
        extra_body={"prompt_logprobs": 1},
    ).choices[0]  # fmt: skip
    values = found.logprobs.token_logprobs
    assert len(values) == len(prompt) + 2 and values[0] is None
    expected = [one.raw for one in (*wanted.prompt_logprobs[1:], *wanted.logprobs)]
    assert values[1:] == pytest.approx(expected, abs=1e-3)
    assert len(found.prompt_logprobs) == len(prompt) and found.prompt_logprobs[0] is None
    assert str(prompt[1]) in found.prompt_logprobs[1]
