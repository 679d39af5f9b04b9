"""A constraint that is a question about the text: may it go on like this, may it end here?

For what no mask can serve: does it compile, does it parse as SQL, does a simulator accept it. A token is asked for in
the order in which the target's noise would choose (or from the likeliest down, at temperature 0), so that the first
that passes is the one that a mask over the whole vocabulary would leave to be chosen: exact, with any drafter, for a
few calls a token instead of one for each id. `weighed` besides estimates without bias how likely a legal token was.

`viable(text)` says whether a text may still become right; `complete(text)` whether it may end, asked where the model
wants to end it (without it: wherever the text is viable). An unfinished character at the end is shown as U+FFFD.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.constrain.predicate.limited import SECONDS, InProcess, InThread
from outrider.constrain.predicate.weighing import first, weighed
from outrider.core.errors import EmptySupport, InputError
from outrider.core.text import token_decoder

MAX_CALLS = 1000  # for one token
KEPT = 4096  # texts whose answers are remembered


class Judge(Protocol):
    """Who answers: functions `viable` and, maybe, `complete`."""

    def has(self, name: str) -> bool: ...
    def __call__(self, name: str, text: str) -> bool: ...
    def close(self) -> None: ...


class Checked:
    """A `protocols.Predicate`. Counts its `calls`, and the tokens it was `asked` for."""

    def __init__(
        self, judge: Judge, decode: Callable[[Sequence[int]], str], ends: Iterable[int] = (),
        special: Iterable[int] = (), max_calls: int = MAX_CALLS,
    ) -> None:  # fmt: skip
        if max_calls < 1:
            raise InputError(f"a predicate with {max_calls} calls a token: allow at least one")
        self.judge, self.max_calls = judge, max_calls
        self.calls = self.asked = 0
        self._decode = decode
        self._ends = frozenset(ends)
        self._never = frozenset(special) - self._ends
        self._answers: dict[tuple[str, str], bool] = {}

    @classmethod
    def of(
        cls, viable: Callable[[str], object] | str | Path, tokenizer: Any, ends: Iterable[int],
        complete: Callable[[str], object] | None = None, seconds: float = SECONDS, max_calls: int = MAX_CALLS,
    ) -> Checked:  # fmt: skip
        """`viable` may be a Python file that has the functions: it then runs in a process that can be killed."""
        judge: Judge
        if isinstance(viable, str | Path):
            if complete is not None:
                raise InputError("a predicate in a file has its complete(text) there; give functions or a file")
            judge = InProcess(viable, seconds)
        else:
            judge = InThread({"viable": viable} | ({} if complete is None else {"complete": complete}), seconds)
        return cls(judge, token_decoder(tokenizer), ends, tokenizer.all_special_ids, max_calls)

    def choose(self, output: Sequence[int], order: Iterator[int]) -> int:
        """Changes nothing but the counts."""
        self.asked += 1
        token = first(islice(order, self.max_calls), partial(self.allows, output))
        if token is None:
            text = self._text(output)[-40:]
            raise EmptySupport(f"the predicate lets none of {self.max_calls:,} tokens follow {text!r}", tuple(output))
        return token

    def weighed(
        self, output: Sequence[int], order: Iterator[int], probs: NDArray[np.float64]
    ) -> tuple[int | None, float]:  # fmt: skip
        """The same token, None where `max_calls` tokens were refused, and a weight; changes `probs`."""
        self.asked += 1
        return weighed(order, probs, partial(self.allows, output), self.max_calls)

    def allows(self, output: Sequence[int], token: int) -> bool:
        if token in self._never:
            return False
        if token in self._ends:
            text = self._text(output)
            return self._ask("complete" if self.judge.has("complete") else "viable", text)
        return self._ask("viable", self._text((*output, token)))

    def close(self) -> None:
        self.judge.close()

    def _text(self, tokens: Sequence[int]) -> str:
        return self._decode(list(tokens))

    def _ask(self, name: str, text: str) -> bool:
        if (name, text) not in self._answers:
            if len(self._answers) >= KEPT:
                self._answers.pop(next(iter(self._answers)))
            self.calls += 1
            self._answers[name, text] = self.judge(name, text)
        return self._answers[name, text]
