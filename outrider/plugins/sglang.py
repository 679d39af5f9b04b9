"""SGLang's plug-in: the algorithm OUTRIDER, its n-gram tree verification with our mixture as the source of drafts.

    python -m sglang.launch_server --model-path M --speculative-algorithm OUTRIDER --speculative-num-draft-tokens 16

SGLang verifies the trees with rules of its own. Imports SGLang only where SGLang calls it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.core.errors import InputError

NAME = "OUTRIDER"
WHOLE = 1 << 30  # tokens of a text that the worker hands over: all of them


class Corpus:
    """In the place of SGLang's n-gram corpus: asked for trees of a fixed number of nodes."""

    def __init__(self, draft_token_num: int) -> None:
        from outrider.plugins.drafting import TokenDrafter

        self.draft_token_num = draft_token_num
        self.drafter = TokenDrafter(draft_token_num - 1, chains=False, padded=True)

    def batch_get(
        self, req_ids: Sequence[str], batch_tokens: Sequence[Sequence[int]], total_lens: Sequence[int]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Tokens [requests * nodes] and, for each node, which nodes it sees [requests * nodes * nodes].

        Node 0 is the last token of the text; a tree with fewer nodes is filled with children of it.
        """
        nodes = self.draft_token_num
        texts = {name: np.array(tokens, dtype=np.int64) for name, tokens in zip(req_ids, batch_tokens, strict=True)}
        trees = self.drafter.draft(texts, dict.fromkeys(texts, nodes - 1))
        tokens = np.zeros((len(req_ids), nodes), dtype=np.int64)
        sees = np.zeros((len(req_ids), nodes, nodes), dtype=np.int64)
        sees[:, :, 0] = 1
        sees[:, np.arange(nodes), np.arange(nodes)] = 1
        for row, name in enumerate(req_ids):
            tree = trees[name]
            tokens[row, : len(tree)] = tree.tokens
            for node in range(1, len(tree)):  # parents come first
                sees[row, node] |= sees[row, tree.parents[node]]
        return tokens.reshape(-1), sees.reshape(-1)

    def batch_put(self, batch_tokens: Sequence[Sequence[int]]) -> None:
        """Nothing to do: texts are read where drafts are asked for."""

    def synchronize(self) -> None:
        """Nothing runs beside."""

    def erase_match_state(self, req_ids: Iterable[str]) -> None:
        """Nothing to do: a request that is not asked for any more has ended, and is remembered."""

    def reset(self) -> None:
        """Changes state: what was learnt is forgotten."""
        from outrider.plugins.drafting import TokenDrafter

        self.drafter = TokenDrafter(self.draft_token_num - 1, chains=False, padded=True)

    def load_external_corpus_named(self, corpus_id: str, chunks: Iterable[Sequence[int]]) -> int:
        raise InputError(f"{NAME} drafts from requests and reads no corpus ({corpus_id}); use the algorithm NGRAM")

    def commit_external_corpus_load(self, corpus_id: str, loaded_token_count: int) -> None:
        raise InputError(f"{NAME} reads no corpus ({corpus_id}); use the algorithm NGRAM")

    def remove_external_corpus(self, corpus_id: str) -> None:
        raise InputError(f"{NAME} has no corpus {corpus_id!r}")

    def list_external_corpora(self) -> dict[str, int]:
        return {}


def register() -> None:
    """What the entry point `sglang.srt.plugins` calls in every process of SGLang; it may be called several times."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.speculative.spec_registry import CustomSpecAlgo, get_spec

    if get_spec(NAME) is not None:
        return

    class Algorithm(CustomSpecAlgo):
        """To SGLang an n-gram algorithm: the same inputs of a verification, the same settings, no draft model."""

        def is_ngram(self) -> bool:
            return True

        def has_draft_kv(self) -> bool:
            return False

        def handle_server_args(self, server_args: Any) -> None:
            SpeculativeAlgorithm.NGRAM.handle_server_args(server_args)

    @SpeculativeAlgorithm.register(NAME, supports_overlap=True, spec_class=Algorithm)  # type: ignore[untyped-decorator]
    def worker(server_args: Any) -> type:
        from sglang.srt.speculative.ngram_worker import NGRAMWorker

        class Worker(NGRAMWorker):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                self.max_trie_depth = WHOLE
                self.ngram_corpus = Corpus(self.draft_token_num)

        return Worker
