"""Which fields of a chat request a server does, ignores or refuses; ours is asked, the others' are read from sources.

    outrider serve &
    python benchmarks/serving/fields.py --url http://127.0.0.1:8000 > docs/guides/serve-compatibility.md

Ours: each field is sent alone, with a value that has to be taken, to a running server. "yes": it was taken; "refused":
the answer was 400 or 501; "ignored": the header said so. The others: the fields that their forms name, in the versions
below. A field in a form need not do anything there: vLLM says of `user` that it is ignored.
"""

from __future__ import annotations

import argparse
import datetime
import json
import urllib.error
import urllib.request
from typing import Any

VLLM = """frequency_penalty logit_bias logprobs top_logprobs max_tokens max_completion_tokens n presence_penalty
response_format seed stop stream stream_options temperature top_p tools tool_choice reasoning_effort
parallel_tool_calls user top_k min_p repetition_penalty stop_token_ids include_stop_str_in_output ignore_eos min_tokens
skip_special_tokens prompt_logprobs allowed_token_ids bad_words echo add_generation_prompt continue_final_message
chat_template chat_template_kwargs structured_outputs stream_interval priority request_id return_token_ids cache_salt
use_beam_search length_penalty truncate_prompt_tokens documents""".split()
SGLANG = """frequency_penalty logit_bias logprobs top_logprobs max_tokens max_completion_tokens n presence_penalty
response_format seed stop stream stream_options temperature top_p user tools tool_choice parallel_tool_calls
reasoning_effort top_k min_p min_tokens regex ebnf repetition_penalty stop_token_ids stop_regex no_stop_trim ignore_eos
continue_final_message skip_special_tokens chat_template_kwargs rid cache_salt priority lora_path return_token_ids
custom_logit_processor return_hidden_states""".split()
LLAMA_CPP = """frequency_penalty logit_bias logprobs top_logprobs max_tokens max_completion_tokens n_predict
presence_penalty response_format seed stop stream stream_options temperature top_p tools tool_choice
parallel_tool_calls top_k min_p repeat_penalty ignore_eos grammar json_schema chat_template_kwargs
add_generation_prompt cache_prompt id_slot samplers timings_per_token typical_p mirostat dry_multiplier""".split()
TRANSFORMERS = """frequency_penalty logit_bias max_tokens max_completion_tokens seed stop stream temperature top_p
tools chat_template_kwargs generation_config""".split()
PEERS = {
    "vLLM": (VLLM, "0.32.0, `ChatCompletionRequest`"),
    "SGLang": (SGLANG, "commit 00d239f, `ChatCompletionRequest`"),
    "llama.cpp": (LLAMA_CPP, "`tools/server/README.md`"),
    "transformers serve": (TRANSFORMERS, "5.23, `UNUSED_CHAT_COMPLETION_FIELDS` left out"),
}
TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
VALUES: dict[str, dict[str, Any]] = {  # what is sent for a field: itself, and what it needs beside it
    "frequency_penalty": {"frequency_penalty": 0.5}, "presence_penalty": {"presence_penalty": 0.5},
    "logit_bias": {"logit_bias": {"5": 1}}, "logprobs": {"logprobs": True},
    "top_logprobs": {"logprobs": True, "top_logprobs": 2}, "max_tokens": {"max_tokens": 2},
    "max_completion_tokens": {"max_completion_tokens": 2}, "n": {"n": 2}, "seed": {"seed": 1}, "stop": {"stop": ["x"]},
    "response_format": {"response_format": {"type": "json_object"}}, "stream": {"stream": True},
    "stream_options": {"stream": True, "stream_options": {"include_usage": True}}, "temperature": {"temperature": 0.5},
    "top_p": {"top_p": 0.5}, "tools": {"tools": [TOOL]}, "tool_choice": {"tools": [TOOL], "tool_choice": "required"},
    "reasoning_effort": {"reasoning_effort": "low"}, "parallel_tool_calls": {"parallel_tool_calls": False},
    "user": {"user": "ann"}, "top_k": {"top_k": 5}, "min_p": {"min_p": 0.1}, "prompt_logprobs": {"prompt_logprobs": 1},
    "repetition_penalty": {"repetition_penalty": 1.1}, "repeat_penalty": {"repeat_penalty": 1.1},
    "stop_token_ids": {"stop_token_ids": [5]}, "include_stop_str_in_output": {"include_stop_str_in_output": True},
    "ignore_eos": {"ignore_eos": True}, "min_tokens": {"min_tokens": 1},
    "skip_special_tokens": {"skip_special_tokens": False}, "allowed_token_ids": {"allowed_token_ids": [5, 6]},
    "bad_words": {"bad_words": ["cat"]}, "echo": {"echo": True}, "regex": {"regex": "a|b"},
    "ebnf": {"ebnf": 'root ::= "a"'}, "add_generation_prompt": {"add_generation_prompt": True},
    "continue_final_message": {"continue_final_message": True},
    "chat_template_kwargs": {"chat_template_kwargs": {"a": 1}},
    "structured_outputs": {"structured_outputs": {"choice": ["a"]}}, "priority": {"priority": 1},
    "request_id": {"request_id": "mine"}, "return_token_ids": {"return_token_ids": True},
    "cache_salt": {"cache_salt": "s"}, "grammar": {"grammar": 'root ::= "a"'}, "json_schema": {"json_schema": {}},
    "prediction": {"prediction": {"type": "content", "content": "Hi"}}, "method": {"method": "plain"},
    "stream_interval": {"stream_interval": 4}, "outrider": {"outrider": {"origins": True}},
}  # fmt: skip


def ours(url: str, name: str) -> str:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, **VALUES.get(name, {name: 1})}
    ask = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(ask, timeout=120) as answer:
            return "ignored" if name in answer.headers.get("x-outrider-ignored", "").split(",") else "yes"
    except urllib.error.HTTPError as error:
        return f"refused ({error.code})"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--url", default="http://127.0.0.1:8000")
    url = arguments.parse_args().url
    names = sorted({*VALUES, *(field for fields, _ in PEERS.values() for field in fields)})
    today = datetime.date.today().isoformat()
    print("# Fields of a chat request, server by server\n")
    print(
        f"Made by `python benchmarks/serving/fields.py` on {today}: ours was asked with each field alone; of the others"
    )
    print("it says whether their form of `/v1/chat/completions` names the field.\n")
    for peer, (_, source) in PEERS.items():
        print(f"- {peer}: {source}")
    print(f"\n| field | outrider | {' | '.join(PEERS)} |\n|---|{'---|' * (len(PEERS) + 1)}")
    for name in names:
        print(f"| `{name}` | {ours(url, name)} | {' | '.join('yes' if name in f else '' for f, _ in PEERS.values())} |")


if __name__ == "__main__":
    main()
