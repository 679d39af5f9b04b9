"""Plain decoding by the unmodified `transformers` model, one token at a time: what every run is held against.

Nothing of Outrider's runtime, engine or verifiers is used, only its sampling semantics and its noise; so a defect that
plain and speculative decoding share shows as well. Slow on purpose.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.check.margin import chosen
from outrider.core.legal import Legal
from outrider.core.params import SamplingArguments, SamplingParams
from outrider.core.protocols import CompileForm, Target
from outrider.core.records import Needs
from outrider.core.sampling import History
from outrider.core.schedule import run_texts

TOP = 32  # logits of the likeliest tokens that are kept of every row, to compare schedules by
Watch = Callable[[str, int], None]  # what is being done, and how many tokens of it were done since the last call


@dataclass(frozen=True, slots=True)
class Job:
    """One text to generate. The seed is set and end-of-text is ignored, so that its length is known."""

    name: str
    prompt: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class Answer:
    """What plain decoding says to a job, and how near each choice was to another one."""

    job: Job
    tokens: list[int]
    margins: NDArray[np.float64]  # [T], in raw logits
    top_ids: NDArray[np.int64]  # [T, TOP], likeliest first
    top_logits: NDArray[np.float64]  # [T, TOP], raw, as scored token by token


class Plain:
    """The caller's model as it is. Does not change state."""

    def __init__(
        self, model: Any, vocab_size: int, eos_ids: frozenset[int] = frozenset(),
        compile_form: CompileForm | None = None,
    ) -> None:  # fmt: skip
        self.model, self.vocab_size = model, vocab_size
        self._eos_ids, self._compile_form = eos_ids, compile_form  # for jobs that ask for a form
        self._can_trim = "logits_to_keep" in inspect.signature(model.forward).parameters

    def decode(self, job: Job, watch: Watch) -> Answer:
        history = self.history(job)
        loose = self.history(job, top_k=0, top_p=1.0, min_p=0.0)
        row, cache = self._begin(job.prompt)
        margins, ids, logits = [], [], []
        while True:
            token, margin = chosen(history, loose, row)
            top = torch.topk(row, min(TOP, row.numel()))
            margins.append(margin)
            ids.append(top.indices.cpu().numpy())
            logits.append(top.values.double().cpu().numpy())
            for one in (history, loose):
                one.append((token,))
            watch("plain decoding", 1)
            ended = history.legal is not None and (token in self._eos_ids or history.legal.exhausted)
            if ended or history.generated == job.params.max_new_tokens:
                return Answer(job, list(history.output), np.array(margins), np.array(ids), np.array(logits))
            rows, cache = self._forward([token], cache)
            row = rows[-1]

    def history(self, job: Job, **changes: Unpack[SamplingArguments]) -> History:
        """The job before its first token, with some parameters changed."""
        params, legal = job.params.with_(**changes), None
        if not params.form:
            return History(job.prompt, params, self.vocab_size)
        assert self._compile_form is not None, "made without forms"
        legal = Legal(self._compile_form(params), job.prompt, self.vocab_size, self._eos_ids)
        return History(job.prompt, params, self.vocab_size, self._eos_ids, legal=legal)

    def rescore(self, answer: Answer, width: int) -> Iterator[Tensor]:
        """The rows of an answer once more, `width` tokens a forward; 0: all in one, without a cache."""
        prompt, tokens = answer.job.prompt, [answer.job.prompt[-1], *answer.tokens[:-1]]
        if not width:
            yield from self.rows(answer.job.prompt, answer.tokens)
            return
        cache = self._forward(prompt[:-1], None, last=True)[1] if len(prompt) > 1 else None
        for start in range(0, len(tokens), width):
            rows, cache = self._forward(tokens[start : start + width], cache)
            yield from rows

    def rows(self, prompt: Sequence[int], tokens: Sequence[int]) -> Tensor:
        """[T, V] raw logits that `tokens` were chosen from, by one forward over prompt and text."""
        rows, _ = self._forward([*prompt, *tokens[:-1]], None, use_cache=False)
        return rows[len(prompt) - 1 :]

    def _begin(self, prompt: Sequence[int]) -> tuple[Tensor, Any]:
        cache = self._forward(prompt[:-1], None, last=True)[1] if len(prompt) > 1 else None
        rows, cache = self._forward(prompt[-1:], cache)
        return rows[-1], cache

    @torch.inference_mode()
    def _forward(
        self, tokens: Sequence[int], cache: Any, *, last: bool = False, use_cache: bool = True
    ) -> tuple[Tensor, Any]:
        options = {"logits_to_keep": 1} if last and self._can_trim else {}
        ids = torch.tensor([list(tokens)], device=self.model.get_input_embeddings().weight.device)
        out = self.model(input_ids=ids, past_key_values=cache, use_cache=use_cache, return_dict=True, **options)
        return out.logits[0].float(), out.past_key_values


class RuntimePlain(Plain):
    """Plain decoding by the runtime itself, without trees: the reference where its precision is not the model's own.

    Holds one slot of the target, anew for every text.
    """

    def __init__(
        self, model: Any, target: Target, eos_ids: frozenset[int] = frozenset(),
        compile_form: CompileForm | None = None,
    ) -> None:  # fmt: skip
        super().__init__(model, target.vocab_size, eos_ids, compile_form)
        self._target, self._slot = target, -1

    def _forward(
        self, tokens: Sequence[int], cache: Any, *, last: bool = False, use_cache: bool = True
    ) -> tuple[Tensor, Any]:
        if cache is None:
            if self._slot >= 0:
                self._target.release(self._slot)
            self._slot = self._target.acquire()
        stream = run_texts(self._target, [(self._slot, tokens)], Needs(logits=not last))
        rows = [chunk.scores.logits.float() for chunks in stream for chunk in chunks if chunk.scores.logits is not None]
        return torch.cat(rows) if rows else torch.empty(0), self._slot
