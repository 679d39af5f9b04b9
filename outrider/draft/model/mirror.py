"""Mirror: the text of a running target sequence, kept as another tokenizer spells it.

New text can change how the text just before it is spelled, so each update encodes again from a border a little way
back and says how many ids stayed. The table of byte offsets aligns both spellings and shows which target tokens the
other tokenizer spells in several. Cost: one encoding of a short window an update, whatever the length of the text.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from outrider.draft.model.vocabulary_map import Vocabulary

WINDOW = 24  # ids that are encoded again
SETTLED = 6  # ids at the front of the window that must come out as before; else a longer window is taken


class Mirror:
    """Changes state in `follow` only."""

    def __init__(self, target: Sequence[bytes], names: dict[int, str], draft: Vocabulary) -> None:
        """`target`: the bytes of its tokens; `names`: its special tokens, which have none."""
        self._target, self._names, self._draft = target, names, draft
        self.text = bytearray()
        self.ids: list[int] = list(draft.start)
        self.ends = [0] * len(self.ids)  # byte offset in the text where each id ends
        self._closed = len(self.ids)  # ids before the last special token: they never change
        self._begin = 0  # where the text after it begins
        self.seen = 0  # target tokens taken up
        self._borders: list[tuple[int, int]] = []  # of the last update: target token, byte offset where it ends
        self._updated = 0  # where the last update began

    def follow(self, tokens: Sequence[int] | NDArray[np.int64]) -> int:
        """Take up the target's tokens beyond those already seen; the number of leading ids that did not change."""
        new, self.seen = tokens[self.seen :], len(tokens)
        self._borders, self._updated = [], len(self.text)
        stayed, begun = len(self.ids), len(self.text)
        for token in map(int, new):
            piece = self._target[token] if token < len(self._target) else b""
            if piece:
                self.text += piece
            else:
                stayed = min(stayed, self._respell(begun))
                self._close(self._draft.names.get(self._names.get(token, "")))
                begun = len(self.text)
            self._borders.append((token, len(self.text)))
        return min(stayed, self._respell(begun))

    def within(self, count: int) -> int:
        """Leading ids that spell the text's first `count` target tokens, which end in what the last update took up."""
        border = count - (self.seen - len(self._borders)) - 1
        return bisect_right(self.ends, self._borders[border][1]) if 0 <= border < len(self._borders) else 0

    def runs(self) -> Iterator[tuple[int, list[int]]]:
        """Target tokens of the last update that several ids spell, each with these ids."""
        begin = self._updated
        at = bisect_left(self.ends, begin)
        for token, end in self._borders:
            last = bisect_left(self.ends, end, lo=at)
            if end > begin and last < len(self.ends) and self.ends[last] == end:
                first = last
                while first > 0 and self.ends[first - 1] > begin:
                    first -= 1
                run = self.ids[first : last + 1]
                if len(run) > 1 and b"".join(self._draft.pieces[i] for i in run) == self._target[token]:
                    yield token, run
                at = first
            begin = end

    def _close(self, name: int | None) -> None:
        """A special token: text before and after it is spelled apart; the other tokenizer's one of that name stands
        between."""
        if name is not None:
            self.ids.append(name)
            self.ends.append(len(self.text))
        self._closed, self._begin = len(self.ids), len(self.text)

    def _respell(self, begun: int) -> int:
        """Spell the text since the last special token again, given that text up to `begun` was spelled before."""
        if begun == len(self.text):
            return len(self.ids)
        back = WINDOW
        while True:
            keep = self._border(len(self.ids) - back)
            begin = max(self.ends[keep - 1], self._begin) if keep > self._closed else self._begin
            ids = self._draft.encode(bytes(self.text[begin:]), first=begin == 0)
            same = _common(ids, self.ids[keep:])
            if keep == self._closed or same >= SETTLED:
                self.ids[keep:] = ids
                self._align(keep)
                return keep + same
            back *= 4

    def _border(self, keep: int) -> int:
        """The last id at or before `keep` that begins with a whole character."""
        while keep > self._closed and self.text[self.ends[keep - 1]] & 0xC0 == 0x80:
            keep -= 1
        return max(keep, self._closed)

    def _align(self, keep: int) -> None:
        """Offsets counted from the end, where drafts go on: an added space at the beginning does not shift them."""
        ends, end = [], len(self.text)
        for i in reversed(self.ids[keep:]):
            ends.append(max(end, 0))
            end -= len(self._draft.pieces[i])
        self.ends[keep:] = reversed(ends)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count
