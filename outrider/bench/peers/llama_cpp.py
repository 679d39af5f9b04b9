"""llama-cpp-python: plain decoding and its prompt lookup, from a GGUF file as it is.

The modes plain-f32 and plain-q8 read the same file with its weights in float32 or eight bits. Its prompt lookup can
change greedy output, so it is no oracle; the bench reports how often it does.
"""

from __future__ import annotations

import time
from io import UnsupportedOperation
from typing import Any

import llama_cpp
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

LOOKUP_TOKENS = 10  # its default; its documentation advises 2 on a CPU
LOOKUP_TOKENS_CPU = 2
LOOKUP_NGRAM = 2


def load(mode: str, settings: dict[str, Any]) -> Peer:
    return Peer(mode, settings)


class Peer:
    def __init__(self, mode: str, settings: dict[str, Any]) -> None:
        if not settings.get("gguf"):
            raise UnsupportedOperation("llama-cpp-python needs the model as a GGUF file; name one with --gguf")
        self.mode = mode
        file = settings["twins"].get(mode, settings)
        on_cpu = settings["device"] == "cpu"
        draft = None
        if mode == "prompt-lookup":
            tokens = LOOKUP_TOKENS_CPU if on_cpu else LOOKUP_TOKENS
            draft = LlamaPromptLookupDecoding(max_ngram_size=LOOKUP_NGRAM, num_pred_tokens=tokens)
        self.model = llama_cpp.Llama(
            file["gguf"], n_ctx=settings["max_context"], n_threads=settings.get("threads") or None,
            n_threads_batch=settings.get("threads") or None, n_gpu_layers=0 if on_cpu else -1, draft_model=draft,
            verbose=False,
        )  # fmt: skip
        self.facts = {
            "version": llama_cpp.__version__, "dtype": "its defaults", "weights": file["gguf_kind"],
            "weight_bytes": file["gguf_bytes"],
        }  # fmt: skip
        self.forwards = 0
        self._eval = self.model.eval
        self.model.eval = self._counted

    def _counted(self, tokens: Any) -> Any:
        self.forwards += 1
        return self._eval(tokens)

    def generate(self, prompts: list[list[int]], params: dict[str, Any]) -> dict[str, Any]:
        if len(prompts) > 1:
            raise UnsupportedOperation("llama-cpp-python's generate runs one prompt at a time")
        ends = () if params["ignore_eos"] else params["eos_ids"]
        self.model.reset()  # rounds repeat prompts: no prefix of an earlier one may be reused
        self.model.set_seed(params["seed"] % 2**32)
        self.forwards = 0
        tokens: list[int] = []
        first_s = 0.0
        begun = time.perf_counter()
        stream = self.model.generate(
            prompts[0], temp=params["temperature"], top_k=params["top_k"], top_p=params["top_p"], min_p=0.0,
            repeat_penalty=1.0,
        )  # fmt: skip
        for token in stream:
            first_s = first_s or time.perf_counter() - begun
            tokens.append(int(token))
            if token in ends or len(tokens) == params["max_new_tokens"]:
                break
        total_s = time.perf_counter() - begun
        stream.close()
        return {"outputs": [tokens], "first_s": first_s, "total_s": total_s, "steps": self.forwards}
