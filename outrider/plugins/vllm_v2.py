"""vLLM's second model runner: the model-free mixture as a speculator class, put in where vLLM makes its speculators.

The second runner is taken where `VLLM_USE_V2_MODEL_RUNNER=1` asks for it. It wants as many drafts of every sequence as
were configured, so that a text with fewer repeats its last token, which is rejected. Cost: the texts come to the host.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

HERE = "outrider.plugins.vllm.Proposer"  # as `speculative_config` names it, for both runners
FACTORY = "init_speculator"
PLACES = ("vllm.v1.worker.gpu.spec_decode", "vllm.v1.worker.gpu.model_runner")  # where that function is looked up


class Speculator:
    """What the runner asks of a speculator without a model; checked against vLLM's base class by a test."""

    num_query_per_req = 1
    num_extra_query_per_req = 0
    supports_mm_inputs = False
    draft_logits = None
    enable_adaptive_verification = False
    pcp_manager: Any = None

    def __init__(self, vllm_config: Any, device: torch.device, req_states: Any) -> None:
        from outrider.plugins.drafting import TokenDrafter

        self.most = int(vllm_config.speculative_config.num_speculative_tokens)
        self.max_model_len = int(vllm_config.model_config.max_model_len)
        self.drafter = TokenDrafter(self.most, padded=True)
        self.req_states = req_states
        size = (int(vllm_config.scheduler_config.max_num_seqs), self.most)
        self.drafts = torch.zeros(size, dtype=torch.int64, device=device)

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Nothing is recorded."""

    def capture(self) -> None:
        """Nothing is recorded."""

    def propose(
        self, input_batch: Any, attn_metadata: Any, slot_mappings: Any, last_hidden_states: Any,
        aux_hidden_states: Any, num_sampled: Tensor, num_rejected: Tensor, last_sampled: Tensor,
        next_prefill_tokens: Any, temperature: Any, seeds: Any, dp_sync_state: Any = None, dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False, mm_inputs: Any = None, is_profile: bool = False,
        num_speculative_tokens: int | None = None,
    ) -> Tensor:  # fmt: skip
        """[num_reqs, num_speculative_tokens], on the device."""
        count = int(input_batch.num_reqs)
        if dummy_run:
            return self.drafts[:count]
        places = input_batch.idx_mapping[:count].long()
        states = self.req_states
        lengths = states.total_len.gpu[places].tolist()
        sampled = num_sampled[:count].tolist()
        tokens = states.all_token_ids.gpu[places, : max(lengths, default=0)].cpu().numpy().astype(np.int64)
        texts = {
            states.index_to_req_id[place]: tokens[row, : lengths[row]]
            for row, place in enumerate(places.tolist())
            if sampled[row]
        }
        wanted = self.most if num_speculative_tokens is None else min(num_speculative_tokens, self.most)
        rooms = {name: max(min(wanted, self.max_model_len - len(text) - 1), 0) for name, text in texts.items()}
        trees = self.drafter.draft(texts, rooms)
        filled = np.repeat(tokens[np.arange(count), np.array(lengths, dtype=np.int64) - 1][:, None], self.most, axis=1)
        for row, place in enumerate(places.tolist()):
            if (tree := trees.get(states.index_to_req_id[place])) is not None:
                filled[row, : tree.candidates] = tree.tokens[1:]
        self.drafts[:count] = torch.from_numpy(filled).to(self.drafts.device)
        return self.drafts[:count]


def install() -> None:
    """Changes vLLM: its factory makes our speculator where our proposer is named, and its own in every other case."""
    for place in PLACES:
        try:
            module = importlib.import_module(place)
        except ImportError:  # a vLLM without that runner, or without what it needs, such as Triton on a CPU
            continue
        made = getattr(module, FACTORY, None)
        if made is not None and not getattr(made, "by_outrider", False):
            setattr(module, FACTORY, _choosing(made))


def _choosing(factory: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
    def init_speculator(vllm_config: Any, device: torch.device, req_states: Any) -> Any:
        speculative = vllm_config.speculative_config
        if speculative.method == "custom_class" and speculative.model == HERE:
            return Speculator(vllm_config, device, req_states)
        return factory(vllm_config, device, req_states)

    init_speculator.by_outrider = True  # type: ignore[attr-defined]
    return init_speculator
