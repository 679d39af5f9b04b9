"""A draft model whose cache is compared with a fresh prefill after every step, and a small model to run it on."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.core.records import NO_NEEDS, Piece
from outrider.core.schedule import run_all
from outrider.core.tree import root
from outrider.draft.model.draft_model import ModelSource


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
    lag = 0  # most tokens of the text that were not in the cache after a step

    def observe(self, slots, records) -> None:
        super().observe(slots, records)
        for slot, record in zip(slots, records, strict=True):
            self._check(self._seats[slot])
            type(self).steps += 1
            type(self).kept += len(record.verdict.path) > 1

    def _check(self, seat) -> None:
        text = seat.context.tokens.tolist()
        cached = self.target.length(seat.slot)
        assert cached < len(text)  # the pending token is never there
        type(self).lag = max(self.lag, len(text) - cached)
        again = self.target.acquire()
        run_all(self.target, [(again, text[:cached])])
        probes = [Piece(slot, tree=root(text[cached])) for slot in (seat.slot, again)]
        kept, fresh = self.target.run(probes, NO_NEEDS)
        torch.testing.assert_close(kept.logits, fresh.logits, atol=1e-4, rtol=1e-4)
        self.target.release(again)
