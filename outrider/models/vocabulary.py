"""Do two models speak in the same token ids? A drafter with other ids would propose nonsense, so it is refused.

Compares what the ids mean, not how many rows a model pads its embedding to.
"""

from __future__ import annotations

from outrider.errors import InputError
from outrider.models.load import LoadedModel


def same_vocabulary(target: LoadedModel, draft: LoadedModel) -> None:
    """Raises unless every token id means the same to both."""
    remedy = f"use a draft model with the vocabulary of {target.name!r}"
    rows, drafted = (m.model.config.get_text_config().vocab_size for m in (target, draft))
    if target.tokenizer is None or draft.tokenizer is None:
        if rows != drafted:
            raise InputError(f"{draft.name!r} has {drafted} tokens and {target.name!r} has {rows}; {remedy}")
        return
    theirs, ours = draft.tokenizer.get_vocab(), target.tokenizer.get_vocab()
    if theirs != ours:
        other = sum(ours.get(token) != index for token, index in theirs.items())
        raise InputError(
            f"the tokenizers differ: {other or len(ours) - len(theirs)} of the {len(theirs)} tokens of {draft.name!r} "
            f"have other ids in {target.name!r}; {remedy}"
        )
