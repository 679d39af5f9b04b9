"""The document of one generation: what its page shows, as plain values for JSON.

The trace knows token ids; here they get their text. Knows no model. Cost: a decoded token for each token and candidate.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from outrider.core.generation import Generation
from outrider.core.text import TextStream

Decode = Callable[[Sequence[int]], str]


def document(
    generation: Generation, decode: Decode, *, prompt: str = "", model: str = "", stop: Sequence[str] = (),
    skip: Collection[int] = (), plain: Generation | None = None,
) -> dict[str, Any]:  # fmt: skip
    """`stop` are the stop strings of the request and `skip` its stop token ids; `plain` is the same decoded plainly.

    Without a trace the document has the text and its origins, and nothing of the steps.
    """
    trace = generation.trace.as_dict() if generation.trace is not None else None
    return {
        "version": 1,
        "model": model,
        "method": generation.stats.method,
        "prompt": prompt,
        "text": generation.text,
        "finish_reason": str(generation.finish_reason),
        "seed": generation.seed,
        "token_ids": list(generation.token_ids),
        "pieces": pieces(generation, decode, stop, skip),
        "origins": [[origin.drafter, origin.depth] for origin in generation.origins],
        "stats": generation.stats.as_dict(),
        "trace": trace,
        "texts": {} if trace is None else {str(token): decode([token]) for token in sorted(_candidates(trace))},
        "plain": None if plain is None else _plain(plain, generation, decode, stop, skip),
    }


def pieces(generation: Generation, decode: Decode, stop: Sequence[str], skip: Collection[int]) -> list[str]:
    """The text that each token made certain; joined they are the text."""
    stream, out = TextStream(decode, stop), []
    for token in generation.token_ids:
        out.append("" if stream.stopped or token in skip else stream.push(token))
    if out:
        out[-1] += stream.finish()
    return out


def _plain(
    plain: Generation, fast: Generation, decode: Decode, stop: Sequence[str], skip: Collection[int]
) -> dict[str, Any]:
    """The plain run: its pieces, when each came, and how many of its first tokens are the other run's."""
    ended = [(len(step.emitted), step.ended) for step in plain.trace.steps] if plain.trace is not None else []
    pairs = zip(plain.token_ids, fast.token_ids, strict=False)
    same = next((i for i, (one, other) in enumerate(pairs) if one != other), None)
    return {
        "token_ids": list(plain.token_ids),
        "pieces": pieces(plain, decode, stop, skip),
        "ended_s": [round(at, 6) for count, at in ended for _ in range(count)],
        "identical": min(len(plain.token_ids), len(fast.token_ids)) if same is None else same,
        "same": plain.token_ids == fast.token_ids,
        "stats": plain.stats.as_dict(),
    }


def _candidates(trace: dict[str, Any]) -> set[int]:
    def each() -> Iterator[int]:
        for step in trace["steps"]:
            yield from step["tree"]["tokens"]
            yield from step["emitted"]

    return set(each())
