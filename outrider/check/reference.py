"""Plain decoding by the unmodified `transformers` model, one token at a time: what every run is held against.

Nothing of Outrider's runtime, engine or verifiers is used, only its sampling semantics and its noise; so a defect that
plain and speculative decoding share shows as well. Slow on purpose, but for what `transformers` does itself: prompts of
about one length go through the model together, padded on the left, and once, however many texts begin with them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
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
from outrider.runtime.support import TESTED_GRAPHS, ropes

TOGETHER = 8  # prompts
TOP = 32  # logits of the likeliest tokens that are kept of every row, to compare schedules by
PADDED_ROPES = {"default", "linear", "llama3", "yarn"}
PADDED_LAYERS = {"full_attention", "sliding_attention"}
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


class _Text:
    """A job while it is decoded. Changes state."""

    def __init__(self, plain: Plain, job: Job) -> None:
        self.job, self.history = job, plain.history(job)
        self._loose = plain.history(job, top_k=0, top_p=1.0, min_p=0.0)
        self._eos_ids = plain.eos_ids
        self._margins: list[float] = []
        self._ids: list[NDArray[np.int64]] = []
        self._logits: list[NDArray[np.float64]] = []
        self.ended = False

    def choose(self, row: Tensor) -> int:
        """The next token, by the row of raw logits behind the text so far."""
        token, margin = chosen(self.history, self._loose, row)
        top = torch.topk(row, min(TOP, row.numel()))
        self._margins.append(margin)
        self._ids.append(top.indices.cpu().numpy())
        self._logits.append(top.values.double().cpu().numpy())
        for one in (self.history, self._loose):
            one.append((token,))
        legal = self.history.legal
        full = self.history.generated == self.job.params.max_new_tokens
        self.ended = full or (legal is not None and (token in self._eos_ids or legal.exhausted))
        return token

    def answer(self) -> Answer:
        found = (np.array(each) for each in (self._margins, self._ids, self._logits))
        return Answer(self.job, list(self.history.output), *found)


@dataclass(frozen=True, slots=True)
class _Prompts:
    """Prompts that the model has read together."""

    texts: list[tuple[int, ...]]
    mask: Tensor  # [N, width], 0 where one is padded
    rows: Tensor  # [N, V], the logits behind each
    cache: Any

    def behind(self, texts: Sequence[tuple[int, ...]]) -> tuple[Tensor, Tensor, Any]:
        """The mask and the logits of each of these, and a cache of their own."""
        places = torch.tensor([self.texts.index(text) for text in texts])
        cache = deepcopy(self.cache)
        cache.batch_select_indices(places)
        return self.mask[places], self.rows[places], cache


class Plain:
    """The caller's model as it is. Keeps what the model made of prompts that go together."""

    def __init__(
        self, model: Any, vocab_size: int, eos_ids: frozenset[int] = frozenset(),
        compile_form: CompileForm | None = None,
    ) -> None:  # fmt: skip
        self.model, self.vocab_size = model, vocab_size
        self.eos_ids, self._compile_form = eos_ids, compile_form  # for jobs that ask for a form
        takes = inspect.signature(model.forward).parameters
        self._can_trim = "logits_to_keep" in takes
        self._can_pad = {"attention_mask", "position_ids"} <= takes.keys() and _same_when_padded(model)
        self._read: list[_Prompts] = []

    def answers(self, jobs: Sequence[Job], watch: Watch) -> list[Answer]:
        """In the order of the jobs."""
        if not self._can_pad:
            return [self.decode(job, watch) for job in jobs]
        known = {text for prompts in self._read for text in prompts.texts}
        new = sorted({job.prompt for job in jobs} - known, key=lambda text: (len(text), text))
        self._read += [self._prompts(new[low : low + TOGETHER]) for low in range(0, len(new), TOGETHER)]
        found: dict[int, Answer] = {}
        for prompts in self._read:
            if some := [i for i, job in enumerate(jobs) if job.prompt in prompts.texts]:
                found |= zip(some, self._together(prompts, [jobs[i] for i in some], watch), strict=True)
        return [found[i] for i in range(len(jobs))]

    def decode(self, job: Job, watch: Watch) -> Answer:
        """One job by itself."""
        text = _Text(self, job)
        row, cache = self._begin(job.prompt)
        while True:
            token = text.choose(row)
            watch("plain decoding", 1)
            if text.ended:
                return text.answer()
            rows, cache = self._forward([token], cache)
            row = rows[-1]

    @torch.inference_mode()
    def _prompts(self, texts: list[tuple[int, ...]]) -> _Prompts:
        width = max(map(len, texts))
        padding = [width - len(text) for text in texts]
        ids = torch.tensor([[0] * count + list(text) for count, text in zip(padding, texts, strict=True)])
        mask = (torch.arange(width) >= torch.tensor(padding)[:, None]).long()
        rows, cache = self._padded(ids, mask, (mask.cumsum(1) - 1).clamp(min=0), None)
        return _Prompts(texts, mask, rows, cache)

    @torch.inference_mode()
    def _together(self, prompts: _Prompts, jobs: Sequence[Job], watch: Watch) -> list[Answer]:
        texts = [_Text(self, job) for job in jobs]
        mask, rows, cache = prompts.behind([job.prompt for job in jobs])
        while True:
            said = []
            for text, row in zip(texts, rows, strict=True):
                if not text.ended:
                    watch("plain decoding", 1)
                said.append(0 if text.ended else text.choose(row))
            if all(text.ended for text in texts):
                return [text.answer() for text in texts]
            ids = torch.tensor(said)[:, None]
            mask = torch.cat([mask, torch.ones_like(ids)], 1)
            rows, cache = self._padded(ids, mask, mask.sum(1, keepdim=True) - 1, cache)

    def _padded(self, ids: Tensor, mask: Tensor, places: Tensor, cache: Any) -> tuple[Tensor, Any]:
        """[N, V] logits behind the last of these tokens."""
        device = self.model.get_input_embeddings().weight.device
        options = {"logits_to_keep": 1} if self._can_trim else {}
        out = self.model(
            input_ids=ids.to(device), attention_mask=mask.to(device), position_ids=places.to(device),
            past_key_values=cache, use_cache=True, return_dict=True, **options,
        )  # fmt: skip
        return out.logits[:, -1].float(), out.past_key_values

    def history(self, job: Job, **changes: Unpack[SamplingArguments]) -> History:
        """The job before its first token, with some parameters changed."""
        params, legal = job.params.with_(**changes), None
        if not params.form:
            return History(job.prompt, params, self.vocab_size)
        assert self._compile_form is not None, "made without forms"
        legal = Legal(self._compile_form(params), job.prompt, self.vocab_size, self.eos_ids)
        return History(job.prompt, params, self.vocab_size, self.eos_ids, legal=legal)

    def behind(self, prompt: Sequence[int]) -> Callable[[], Any]:
        """Gives the cache behind all of a prompt but its last token, each time as new."""
        cache = self._forward(prompt[:-1], None, last=True)[1] if len(prompt) > 1 else None
        return lambda: deepcopy(cache)

    def rescore(self, answer: Answer, width: int, begin: Callable[[], Any]) -> Iterator[Tensor]:
        """The rows of an answer once more, `width` tokens a forward from what is `behind` its prompt; 0: all in one,
        without a cache."""
        prompt, tokens = answer.job.prompt, [answer.job.prompt[-1], *answer.tokens[:-1]]
        if not width:
            yield from self.rows(prompt, answer.tokens)
            return
        cache = begin()
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


def _same_when_padded(model: Any) -> bool:
    """Whether a padded text is surely computed as by itself: not where a state may run through the padding, nor where
    the longest text of a batch decides how positions are rotated."""
    text = model.config.get_text_config(decoder=True)
    kinds = {str(rope.get("rope_type", "default")) for rope in ropes(getattr(text, "rope_parameters", None))}
    layers = set(getattr(text, "layer_types", None) or ())
    return text.model_type in TESTED_GRAPHS and kinds <= PADDED_ROPES and layers <= PADDED_LAYERS


class RuntimePlain(Plain):
    """Plain decoding by the runtime itself, without trees: the reference where its precision is not the model's own.

    Holds one slot of the target, anew for every text.
    """

    def __init__(
        self, model: Any, target: Target, eos_ids: frozenset[int] = frozenset(),
        compile_form: CompileForm | None = None,
    ) -> None:  # fmt: skip
        super().__init__(model, target.vocab_size, eos_ids, compile_form)
        self._target, self._slot, self._can_pad = target, -1, False

    def behind(self, prompt: Sequence[int]) -> Callable[[], Any]:
        return lambda: self._forward(prompt[:-1], None, last=True)[1] if len(prompt) > 1 else None

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
