"""A draft model whose cache is compared with a fresh prefill after every step, and a small model to run it on."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.draft.model import ModelSource
from outrider.protocols import Needs
from outrider.tree import root


def llama(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=53, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.3,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


class Watched(ModelSource):
    """After every step the draft's cache must hold exactly what a fresh prefill of the same text would."""

    steps = 0
    kept = 0

    def observe(self, slot, record) -> None:
        super().observe(slot, record)
        seat = self._seats[slot]
        text = seat.context.tokens.tolist()
        cached = self.target.length(seat.slot)
        assert text[cached:] == seat.lead
        again = self.target.acquire()
        for _ in self.target.prefill([again], [text[: cached + 1]], Needs()):
            pass
        mine, fresh = self.target.verify([seat.slot, again], [root(text[cached])] * 2, Needs())
        torch.testing.assert_close(mine.logits, fresh.logits, atol=1e-4, rtol=1e-4)
        self.target.release(again)
        type(self).steps += 1
        type(self).kept += len(record.verdict.path) > 1
