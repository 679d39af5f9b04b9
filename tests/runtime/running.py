"""Passes of whole prompts and of trees, in as few words as tests want them."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.core.protocols import Target
from outrider.core.records import NO_NEEDS, Chunk, Needs, Piece, Scores
from outrider.core.tree import TokenTree, chain


def run_text(
    target: Target, slots: Sequence[int], prompts: Sequence[Sequence[int]], needs: Needs = NO_NEEDS
) -> list[list[Chunk]]:
    """All but the last token of each prompt, in passes as wide as the target wants them; what each pass gave."""
    left = {slot: list(prompt[:-1]) for slot, prompt in zip(slots, prompts, strict=True) if len(prompt) > 1}
    passes = []
    while left:
        width = max(1, target.traits.prompt_rows // len(left))
        pieces = [Piece(slot, tokens[:width]) for slot, tokens in left.items()]
        starts = [target.length(slot) for slot in left]
        scores = target.run(pieces, needs)
        passes.append([Chunk(p.slot, at, p.tokens, s) for p, at, s in zip(pieces, starts, scores, strict=True)])
        left = {slot: tokens[width:] for slot, tokens in left.items() if len(tokens) > width}
    return passes


def run_trees(
    target: Target, slots: Sequence[int], trees: Sequence[TokenTree], needs: Needs = NO_NEEDS,
    done: Sequence[int] | None = None,
) -> list[Scores]:  # fmt: skip
    skipped = done or [0] * len(slots)
    pieces = [Piece(s, tree=tree, done=n) for s, tree, n in zip(slots, trees, skipped, strict=True)]
    return target.run(pieces, needs)


def shorter_prefixes(target: Target, text: Sequence[int], length: int) -> list[tuple[Scores, Scores]]:
    """A slot cut to `length` tokens and a shorter fork of a longer one, each beside a slot that was never longer.

    Given are the scores of three tokens more, as text. A tree is in flight where text is cut, and leaves no trace.
    """
    more, needs = [int(token) for token in text[length : length + 3]], Needs(logits=True)
    plain, long = target.acquire(), target.acquire()
    run_text(target, [plain, long], [[*text[:length], 0], [*text, 0]])
    run_trees(target, [long], [chain(1, [2, 3])])
    short = target.fork(long, length)
    target.truncate(long, length)
    assert target.length(short) == target.length(long) == length
    want, *found = (target.run([Piece(slot, more)], needs)[0] for slot in (plain, long, short))
    for slot in (plain, long, short):
        target.release(slot)
    return [(want, scores) for scores in found]


def together_and_apart(
    target: Target, prompt: Sequence[int], tree: TokenTree, text: Sequence[int]
) -> list[tuple[Scores, Scores]]:
    """A tree behind a prompt and the text of another slot, in one pass and in two."""
    found = []
    for together in (True, False):
        slots = target.acquire(), target.acquire()
        run_text(target, slots[:1], [prompt])
        pieces = [Piece(slots[1], text), Piece(slots[0], tree=tree)]
        found.append(
            [s for part in ([pieces] if together else [[p] for p in pieces]) for s in target.run(part, NO_NEEDS)]
        )
        assert found[-1][0].logits is None
        found[-1][0] = target.run([Piece(slots[1], tree=tree)], NO_NEEDS)[0]  # what the text has left behind
        for slot in slots:
            target.release(slot)
    return list(zip(*found, strict=True))
