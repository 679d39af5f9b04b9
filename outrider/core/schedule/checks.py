"""What a request, and a drafter's tree, must be to go on; every message names the remedy."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.core.errors import InputError, OutriderError
from outrider.core.generation import Generation
from outrider.core.params import SamplingParams
from outrider.core.protocols import Target
from outrider.core.records import Budget
from outrider.core.schedule.handle import Terms
from outrider.core.tree import TokenTree


def check_prompt(
    prompt: Sequence[int], params: SamplingParams, terms: Terms, target: Target, decodes: bool
) -> None:  # fmt: skip
    """Raises where this cannot run on this target, or in a text that nobody `decodes`."""
    said = terms.resume_from.token_ids if isinstance(terms.resume_from, Generation) else terms.resume_from
    if len(prompt) == 0:
        raise InputError("the prompt is empty; give at least one token")
    if len(prompt) >= target.max_context:
        raise InputError(
            f"the prompt has {len(prompt)} tokens but the context holds {target.max_context}; "
            "shorten it or load with a larger max_context"
        )
    for name, tokens in (("the prompt", prompt), ("resume_from", said)):
        if len(tokens) and (min(tokens) < 0 or max(tokens) >= target.vocab_size):
            raise InputError(f"{name} has token ids outside 0..{target.vocab_size - 1}; check the tokenizer")
    if len(said) and params.n > 1:
        raise InputError(f"resume_from is of one sample, and n={params.n}; resume each sample in its own request")
    if params.stop and not decodes:
        raise InputError("stop strings need a tokenizer; give stop_token_ids or load the model with its tokenizer")


def check_tree(tree: TokenTree, pending: int, budget: Budget, vocab_size: int, name: str) -> None:
    """Raises where a drafter proposed what it must not."""
    if tree.tokens[0] != pending:
        raise OutriderError(f"{name} proposed a tree that does not hang on the pending token")
    if tree.candidates > budget.nodes or tree.depth > budget.depth:
        raise OutriderError(f"{name} proposed {tree.candidates} nodes, {tree.depth} deep, over its budget {budget}")
    if tree.candidates and not (tree.tokens.min() >= 0 and tree.tokens.max() < vocab_size):
        raise OutriderError(f"{name} proposed token ids outside 0..{vocab_size - 1}")
