"""vLLM's proposer: the model-free mixture for its V1 runner, named by `speculative_config`, and the plug-in's entry.

    LLM(model, speculative_config={"model": "outrider.plugins.vllm.Proposer", "num_speculative_tokens": 16})

vLLM verifies the drafts with rules of its own; greedy output stays its own greedy output. Imports nothing of vLLM, and
the drafters only when they are wanted: vLLM loads this module in every process, and starts no CPU worker behind numba.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Proposer:
    """vLLM makes one for each worker and asks it after every step."""

    def __init__(self, vllm_config: Any) -> None:
        from outrider.plugins.drafting import TokenDrafter
        from outrider.plugins.rows import RowNames

        speculative = vllm_config.speculative_config
        self.most = int(speculative.num_speculative_tokens)
        self.max_model_len = int(vllm_config.model_config.max_model_len)
        self.drafter = TokenDrafter(self.most)
        self.names = RowNames()

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """There is none; vLLM's CPU worker asks for it."""

    def propose(
        self, sampled_token_ids: Sequence[Sequence[int]], num_tokens_no_spec: NDArray[np.integer[Any]],
        token_ids_cpu: NDArray[np.integer[Any]], slot_mappings: Any = None, **_: Any,
    ) -> list[list[int]]:  # fmt: skip
        """Drafts for each row, at most `num_speculative_tokens`: vLLM stops at a longer one.

        A row without a sampled token is in the middle of its prompt and gets none.
        """
        rows = [row for row, sampled in enumerate(sampled_token_ids) if len(sampled)]
        texts = [token_ids_cpu[row, : num_tokens_no_spec[row]].astype(np.int64) for row in rows]
        names = self.names.names(rows, texts)
        rooms = {
            name: max(min(self.most, self.max_model_len - len(text) - 1), 0)
            for name, text in zip(names, texts, strict=True)
        }
        trees = self.drafter.draft(dict(zip(names, texts, strict=True)), rooms)
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        for row, name in zip(rows, names, strict=True):
            drafts[row] = trees[name].tokens[1 : 1 + rooms[name]].tolist()
        return drafts


def register() -> None:
    """What the entry point `vllm.general_plugins` calls in every process of vLLM; it may be called several times."""
    from outrider.plugins.vllm_v2 import install

    install()
