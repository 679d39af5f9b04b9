"""transformers: greedy or sampled `generate`, its prompt lookup, and assisted generation with a draft model."""

from __future__ import annotations

import time
from io import UnsupportedOperation
from typing import Any, ClassVar

import torch
import transformers
from transformers import AutoModelForCausalLM

LOOKUP_TOKENS = 10  # its documentation's own value


def load(mode: str, settings: dict[str, Any]) -> Peer:
    return Peer(mode, settings)


class Peer:
    _models: ClassVar[dict[str, Any]] = {}  # one target for all modes

    def __init__(self, mode: str, settings: dict[str, Any]) -> None:
        if settings.get("threads"):
            torch.set_num_threads(settings["threads"])
        self.mode, self.device = mode, torch.device(settings["device"])
        self.model = self._model(settings["model"], settings["dtype"])
        self.more: dict[str, Any] = {}
        if mode == "prompt-lookup":
            self.more = {"prompt_lookup_num_tokens": LOOKUP_TOKENS}
        if mode == "assisted":
            if not settings.get("draft"):
                raise UnsupportedOperation("assisted generation needs a draft model; name one with --draft")
            self.more = {"assistant_model": self._model(settings["draft"], settings["dtype"])}
        self.facts = {
            "version": transformers.__version__, "torch": torch.__version__, "dtype": settings["dtype"],
            "weights": "the same",
        }  # fmt: skip
        if self.device.type == "cuda":
            self.peak_bytes = lambda: int(torch.cuda.max_memory_allocated(self.device))

    def _model(self, path: str, dtype: str) -> Any:
        if path not in self._models:
            model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
            self._models[path] = model.requires_grad_(False).eval().to(self.device)
        return self._models[path]

    def generate(self, prompts: list[list[int]], params: dict[str, Any]) -> dict[str, Any]:
        if self.more and len(prompts) > 1:
            raise UnsupportedOperation(f"{self.mode} of transformers runs one prompt at a time")
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=self.device)  # padded on the left
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=self.device)
        sampling: dict[str, Any] = {"do_sample": False}
        if params["temperature"] > 0:
            torch.manual_seed(params["seed"])
            sampling = {
                "do_sample": True, "temperature": params["temperature"], "top_k": params["top_k"],
                "top_p": params["top_p"],
            }  # fmt: skip
        end = None if params["ignore_eos"] else params["eos_ids"]
        watch = Watch(self.model, self.device, width)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        with torch.inference_mode(), watch:
            out = self.model.generate(
                ids, attention_mask=mask, max_new_tokens=params["max_new_tokens"], pad_token_id=0, eos_token_id=end,
                **sampling, **self.more,
            )  # fmt: skip
            watch.wait()
        return {
            "outputs": [row[width:].tolist() for row in out], "first_s": watch.first_s, "total_s": watch.total_s,
            "early": watch.early * len(prompts), "steps": watch.forwards,
        }  # fmt: skip


class Watch:
    """Counts the target's forwards. When the second begins the first tokens are there; more than one where the first
    forward had candidates behind the prompt."""

    def __init__(self, model: Any, device: torch.device, prompt: int) -> None:
        self.model, self.device, self.prompt = model, device, prompt
        self.forwards, self.early, self.first_s, self.total_s = 0, 1, 0.0, 0.0

    def __enter__(self) -> Watch:
        self.hook = self.model.register_forward_pre_hook(self._count, with_kwargs=True)
        self.wait()
        self.begun = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.total_s = time.perf_counter() - self.begun
        self.first_s = self.first_s or self.total_s
        self.hook.remove()

    def _count(self, model: Any, args: Any, kwargs: dict[str, Any]) -> None:
        self.forwards += 1
        if self.forwards == 2:
            self.first_s = time.perf_counter() - self.begun
            self.early = kwargs["past_key_values"].get_seq_length() - self.prompt + 1

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
