"""A caller's transformers logits processors as a constraint: each tree node is processed as if it were the whole text.

Exact for processors that are functions of one row's ids and scores, which is what nearly all are; those that are known
not to be, or are seen to remember their calls, are refused by name. Cost: one call of every processor for every node
that verification looks at, with ids as long as the text, where the engine's own parameters need a few operations.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import LogitsProcessorList

from outrider.core.errors import InputError

RowPair = tuple[Tensor, Tensor]  # raw and processed logits, [V] float32 each

# class name -> why a call for one node of a tree cannot be right
_REFUSED = {
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": "guidance runs a second forward with a cache of its own",
    "ClassifierFreeGuidanceLogitsProcessor": "guidance mixes two rows of the batch",
    "DiaClassifierFreeGuidanceLogitsProcessor": "guidance mixes two rows of the batch",
    "DiaEOSChannelFilterLogitsProcessor": "it works on several channels at once",
    "DiaEOSDelayPatternLogitsProcessor": "it remembers its calls",
    "SynthIDTextWatermarkLogitsProcessor": "it remembers its calls",
    "WhisperNoSpeechDetection": "it runs the model and remembers the answer",
}


def refuse_unsupported(processors: Sequence[Any]) -> None:
    """Raise `InputError` for a processor that cannot be asked about single nodes of a tree."""
    for processor in processors:
        for kind in type(processor).__mro__:
            if why := _REFUSED.get(kind.__name__):
                raise InputError(
                    f"the logits processor {type(processor).__name__} cannot be honoured: {why}; leave it out or call "
                    "generate without custom_generate"
                )


class Processors:
    """The processors of one row of a batch. `padding` are the ids left of the prompt that processors expect to see.

    `keep` makes it remember the rows it was asked for until `take` fetches them. `distrust` asks foreign processors
    twice at the first node and refuses those that answer differently or change in between.
    """

    def __init__(
        self, processors: Sequence[Any], padding: Sequence[int] = (), *, keep: bool = False, distrust: bool = True
    ) -> None:
        self.processors = LogitsProcessorList(processors)
        self._padding = np.asarray(padding, dtype=np.int64)
        self._kept: dict[bytes, RowPair] | None = {} if keep else None
        self._suspects = [p for p in processors if distrust and not _from_transformers(p)]

    def reshape(self, tokens: NDArray[np.int64], logits: Tensor) -> Tensor:
        """[V] -> [V]. Changes state only in what `take` returns."""
        raw = logits.clone() if self._kept is not None or self._suspects else logits
        ids = torch.from_numpy(np.concatenate([self._padding, tokens])).to(logits.device)[None]
        if self._suspects:
            self._examine(ids, raw)
        scores = self.processors(ids, logits[None])[0]
        if self._kept is not None:
            self._kept[tokens.tobytes()] = (raw, scores)
        return scores

    def take(self, tokens: NDArray[np.int64]) -> RowPair:
        """Raw and processed logits after `tokens`. Changes state: forgets them and all rows that are not deeper."""
        assert self._kept is not None, "made without keep"
        row = self._kept[tokens.tobytes()]
        self._kept = {key: kept for key, kept in self._kept.items() if len(key) > tokens.nbytes}
        return row

    def _examine(self, ids: Tensor, logits: Tensor) -> None:
        """A function of ids and scores gives the same answer twice, and nothing it holds counts along."""
        for suspect in self._suspects:
            first = suspect(ids, logits[None].clone())
            before = _state(suspect)
            try:
                second = suspect(ids, logits[None].clone())
            except Exception as error:
                raise _stateful(suspect, f"its second call for one text fails: {error!r}") from error
            if not torch.allclose(first, second, rtol=0, atol=0, equal_nan=True):
                raise _stateful(suspect, "asked twice about one text it answers differently")
            for name, value in _state(suspect).items():
                if not _same(before.get(name), value):
                    raise _stateful(suspect, f"its {name!r} changes from call to call")
        self._suspects = []


def for_row(processors: Sequence[Any], row: int, batch: int) -> list[Any]:
    """The processors that see rows by their place in the batch, made to see this one row; the others as they are."""
    return [
        _BY_ROW[type(p).__name__](p, row, batch) if _from_transformers(p) and type(p).__name__ in _BY_ROW else p
        for p in processors
    ]


def _prefix(processor: Any, row: int, batch: int) -> Any:
    allowed = processor._prefix_allowed_tokens_fn
    return type(processor)(lambda _, ids: allowed(row, ids), 1)


def _prompt_penalty(processor: Any, row: int, batch: int) -> Any:
    single = copy.copy(processor)
    at = row * len(single.encoder_input_ids) // batch  # several sequences may have been returned for a prompt
    single.encoder_input_ids = single.encoder_input_ids[at : at + 1]
    return single


def _prompt_ngrams(processor: Any, row: int, batch: int) -> Any:
    single = copy.copy(processor)
    single.generated_ngrams = [single.generated_ngrams[row * single.batch_size // batch]]
    single.batch_size = 1
    return single


def _ignored_padding(processor: Any, row: int, batch: int) -> Any:
    lengths = processor.prompt_ignore_length
    if not isinstance(lengths, Tensor):  # one length for all rows, or none
        return processor
    single = copy.copy(processor)
    at = row * len(lengths) // batch
    single.prompt_ignore_length = lengths[at : at + 1]
    return single


_BY_ROW: dict[str, Callable[[Any, int, int], Any]] = {
    "PrefixConstrainedLogitsProcessor": _prefix,
    "EncoderRepetitionPenaltyLogitsProcessor": _prompt_penalty,
    "EncoderNoRepeatNGramLogitsProcessor": _prompt_ngrams,
    "RepetitionPenaltyLogitsProcessor": _ignored_padding,
}


def _from_transformers(processor: Any) -> bool:
    return type(processor).__module__.startswith("transformers.")


def _stateful(processor: Any, evidence: str) -> InputError:
    name = getattr(processor, "__name__", type(processor).__name__)
    return InputError(
        f"the logits processor {name} cannot be honoured, because it remembers its calls ({evidence}); make it a "
        "function of input_ids and scores, or call generate without custom_generate"
    )


def _state(processor: Any) -> dict[str, Any]:
    """Plain values that the processor holds. What it keeps in dictionaries is taken for a memo."""
    held = getattr(processor, "__dict__", {})
    return {k: _copied(v) for k, v in held.items() if isinstance(v, Tensor | list | tuple | int | float | str | None)}


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    return [_copied(v) for v in value] if isinstance(value, list | tuple) else value


def _same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return a.shape == b.shape and bool(torch.allclose(a, b, rtol=0, atol=0, equal_nan=True))
    if isinstance(a, list):
        return len(a) == len(b) and all(map(_same, a, b))
    return not isinstance(a, int | float | str) or a == b
