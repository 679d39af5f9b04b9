"""vLLM on a CPU or a GPU: plain decoding, n-gram lookup and suffix decoding, step by step through its engine.

The engine runs in this process, so that no other one spins while the next system is measured. Prefix caching is off,
for rounds repeat prompts; suffix decoding keeps its memory of earlier answers only where the bench keeps memory.
"""

from __future__ import annotations

import os
import time
from typing import Any

NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
SUFFIX = {"method": "suffix", "num_speculative_tokens": 16}
OURS = {"model": "outrider.plugins.vllm.Proposer", "num_speculative_tokens": 16}
CACHE_GB = "1"


def load(mode: str, settings: dict[str, Any]) -> Peer:
    return Peer(mode, settings)


class Peer:
    def __init__(self, mode: str, settings: dict[str, Any]) -> None:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", CACHE_GB)
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        import vllm  # type: ignore[import-not-found]

        self.vllm = vllm
        speculative: dict[str, Any] | None = {
            "plain": None, "ngram": NGRAM, "suffix": SUFFIX, "outrider": OURS
        }[mode]  # fmt: skip
        if settings.get("drafter"):
            speculative = {
                "method": "eagle3",
                "model": settings["drafter"],
                "num_speculative_tokens": settings["depth"],
            }
        if mode == "suffix" and settings["memory"] == "reset":
            speculative = {**SUFFIX, "suffix_decoding_max_cached_requests": 0}
        more: dict[str, Any] = {} if settings["device"] == "cpu" else {"gpu_memory_utilization": 0.3}
        model = vllm.LLM(
            settings["model"], dtype=settings["dtype"], max_model_len=settings["max_context"],
            max_num_seqs=max(settings["slots"], 1), enable_prefix_caching=False, speculative_config=speculative,
            skip_tokenizer_init=True, seed=0, enforce_eager=settings["device"] == "cpu", **more,
        )  # fmt: skip
        self.engine = model.llm_engine
        self.facts = {"version": vllm.__version__, "dtype": settings["dtype"], "weights": "the same"}
        self.requests = 0

    def generate(self, prompts: list[list[int]], params: dict[str, Any]) -> dict[str, Any]:
        sampling = self.vllm.SamplingParams(
            temperature=params["temperature"], top_k=params["top_k"] or -1, top_p=params["top_p"],
            seed=params["seed"] if params["temperature"] > 0 else None, max_tokens=params["max_new_tokens"],
            stop_token_ids=None if params["ignore_eos"] else params["eos_ids"], ignore_eos=True, detokenize=False,
        )  # fmt: skip
        outputs: dict[str, list[int]] = {}
        begun = time.perf_counter()
        for ids in prompts:
            name = str(self.requests)
            outputs[name] = []
            self.requests += 1
            self.engine.add_request(name, {"prompt_token_ids": ids}, sampling)
        steps = early = turns = 0
        first_s = 0.0
        while self.engine.has_unfinished_requests():
            steps += 1
            for made in self.engine.step():
                outputs[made.request_id] = list(made.outputs[0].token_ids)
                turns += 1
            if not first_s and all(outputs.values()):
                first_s, early, steps = time.perf_counter() - begun, sum(map(len, outputs.values())), 1
        return {
            "outputs": list(outputs.values()), "first_s": first_s, "total_s": time.perf_counter() - begun,
            "early": early, "steps": steps, "turns": turns,
        }  # fmt: skip
