"""openvino-genai: plain decoding and prompt lookup, step by step through its continuous batching, from a GGUF file.

Reads the GGUF itself, the quantised kinds but not float32; the mode plain-q8 reads it with weights of eight bits. Its
defaults are kept, a quantised cache among them: two of its modes can give different greedy texts.
"""

from __future__ import annotations

import time
from io import UnsupportedOperation
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai

LOOKUP_TOKENS, LOOKUP_NGRAM = 5, 3  # the values of its own examples
CACHE_GB = 2


def load(mode: str, settings: dict[str, Any]) -> Peer:
    return Peer(mode, settings)


class Peer:
    def __init__(self, mode: str, settings: dict[str, Any]) -> None:
        if settings["device"] != "cpu":
            raise UnsupportedOperation("openvino-genai is measured on the CPU only")
        if not settings.get("gguf"):
            raise UnsupportedOperation("openvino-genai needs the model as a GGUF file; name one with --gguf")
        self.mode = mode
        file = settings["twins"].get(mode, settings)
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = CACHE_GB
        scheduler.enable_prefix_caching = False  # rounds repeat prompts
        scheduler.max_num_batched_tokens = settings["max_context"]
        scheduler.dynamic_split_fuse = True
        properties: dict[str, Any] = {"prompt_lookup": True} if mode == "prompt-lookup" else {}
        if settings.get("threads"):
            properties["INFERENCE_NUM_THREADS"] = settings["threads"]
        self.pipeline = genai.ContinuousBatchingPipeline(file["gguf"], scheduler, "CPU", properties)
        self.facts = {
            "version": genai.__version__, "dtype": "its defaults", "weights": file["gguf_kind"],
            "weight_bytes": file["gguf_bytes"],
        }  # fmt: skip
        self.requests = 0

    def generate(self, prompts: list[list[int]], params: dict[str, Any]) -> dict[str, Any]:
        config = genai.GenerationConfig()
        config.max_new_tokens = params["max_new_tokens"]
        config.ignore_eos = params["ignore_eos"]
        config.stop_token_ids = set(params["eos_ids"])
        if params["temperature"] > 0:
            config.do_sample, config.temperature = True, params["temperature"]
            config.top_k, config.top_p = params["top_k"] or 2**31 - 1, params["top_p"]
            config.rng_seed = params["seed"] % 2**31
        if self.mode == "prompt-lookup":
            config.num_assistant_tokens, config.max_ngram_size = LOOKUP_TOKENS, LOOKUP_NGRAM
        outputs: list[list[int]] = [[] for _ in prompts]
        steps = early = 0
        first_s = 0.0
        begun = time.perf_counter()
        handles = []
        for ids in prompts:
            tensor = ov.Tensor(np.array([ids], dtype=np.int64))
            handles.append(self.pipeline.add_request(self.requests, tensor, config))
            self.requests += 1
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
            steps += 1
            for handle, tokens in zip(handles, outputs, strict=True):
                while handle.can_read():
                    for piece in handle.read().values():
                        tokens += piece.generated_ids
            if not first_s and all(outputs):
                first_s, early, steps = time.perf_counter() - begun, sum(map(len, outputs)), 1
        return {
            "outputs": outputs, "first_s": first_s, "total_s": time.perf_counter() - begun, "early": early,
            "steps": steps,
        }  # fmt: skip
