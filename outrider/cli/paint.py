"""Colours for who brought a token: the target, or a drafter at some depth of its tree. Brackets where there are none.

Decodes the tokens again, so that each piece of text belongs to the token that made it certain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from outrider.core.text import TextStream

if TYPE_CHECKING:
    from outrider.core.generation import Generation, Origin

DEPTHS = ("green", "cyan", "blue", "magenta")  # depth 1, 2, 3, and 4 or deeper
BRACKETS = "⟦", "⟧"


class Painter:
    """Feed it the generation as it grows; it gives the newly certain text, coloured. Changes state."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str], skip: Sequence[int], colour: bool):
        self._stream = TextStream(decode, stop)
        self._skip = frozenset(skip)  # stop tokens end a text without being part of it
        self._colour = colour
        self._done = 0
        self._bracket_open = False

    def grow(self, generation: Generation) -> Text:
        painted = Text()
        for token, origin in list(zip(generation.token_ids, generation.origins, strict=True))[self._done :]:
            self._done += 1
            if not self._stream.stopped and token not in self._skip:
                self._add(painted, self._stream.push(token), origin)
        return painted

    def finish(self, generation: Generation) -> Text:
        painted = self.grow(generation)
        if generation.origins:
            self._add(painted, self._stream.finish(), generation.origins[-1])
        if self._bracket_open:
            painted.append(BRACKETS[1])
        return painted

    def _add(self, painted: Text, piece: str, origin: Origin) -> None:
        if not piece:
            return
        drafted = origin.depth > 0
        if not self._colour and drafted != self._bracket_open:
            painted.append(BRACKETS[0] if drafted else BRACKETS[1])
            self._bracket_open = drafted
        painted.append(piece, style=style_of(origin.depth) if self._colour else "")


def style_of(depth: int) -> str:
    return DEPTHS[min(depth, len(DEPTHS)) - 1] if depth else ""


def legend(origins: Sequence[Origin], colour: bool) -> Text:
    """What the colours mean, with the share of the text that was drafted."""
    drafted = [o for o in origins if o.depth]
    names = ", ".join(dict.fromkeys(o.drafter for o in drafted)) or "a drafter"
    text = Text("tokens by origin: ", style="dim")
    if colour:
        text.append("target", style="not dim").append(f" · {names} at depth")
        for depth, style in enumerate(DEPTHS, 1):
            text.append(f" {depth}{'+' if depth == len(DEPTHS) else ''}", style=f"not dim {style}")
    else:
        text.append(f"target · {BRACKETS[0]}{names}{BRACKETS[1]}")
    return text.append(f" · {len(drafted)} of {len(origins)} drafted")
