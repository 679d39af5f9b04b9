"""Text to token ids in bulk, and a name for what a tokenizer does: ids of one mean nothing to another."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

PROBE = "The quick brown fox, 1234567 times:\n\n    def f(x):\treturn x**2  # naïve café 東京 🙂\r\n<|im_start|>"
BARE = "token ids"  # of a model without a tokenizer

Encode = Callable[[Sequence[str]], list[list[int]]]


def encoder(tokenizer: Any) -> Encode:
    """Encodes many texts at once, without special tokens, on all cores where the tokenizer is a compiled one."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return lambda texts: tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    copied = type(backend).from_str(backend.to_str())  # the caller's keeps its settings
    copied.no_truncation()
    copied.no_padding()
    return lambda texts: [one.ids for one in copied.encode_batch_fast(list(texts), add_special_tokens=False)]


def fingerprint(tokenizer: Any) -> str:
    """Equal where every id means the same and a text of all sorts is cut alike."""
    if tokenizer is None:
        return BARE
    content = [sorted(tokenizer.get_vocab().items()), encoder(tokenizer)([PROBE])]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def vocabulary(tokenizer: Any) -> int:
    """One more than the largest id."""
    return max(tokenizer.get_vocab().values()) + 1
