"""The drop-in for transformers: `model.generate(**inputs, custom_generate=outrider.generate)`, same output, sooner.

Logits processors, stopping criteria, streamer, left padding, seeds and return types are the caller's, as
transformers prepared them. What cannot be honoured is refused by name, never ignored. Prepares nothing itself:
everything before the decoding loop is transformers' own work.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation import GenerateDecoderOnlyOutput

from outrider import methods
from outrider.api import Outrider
from outrider.constrain.processors import Processors, for_row
from outrider.constrain.processors import refuse_unsupported as refuse_processors
from outrider.core.engine import Engine
from outrider.core.errors import InputError
from outrider.core.protocols import Recipe
from outrider.core.sampling import SamplingParams
from outrider.models.generation_config import dropped_arguments, refuse_unsupported
from outrider.models.load import LoadedModel, fingerprint
from outrider.runtime.recurrent.mixers import Mixers
from outrider.runtime.support import context_limit
from outrider.runtime.support import refuse_unsupported as refuse_model

SESSION = "_outrider"  # where a model keeps its session, so that both are freed together
# Every call has these: looked up instead of asked, no tensors a token.
LOOKED_UP = (MaxLengthCriteria, EosTokenCriteria)
# These answer for each row alone: asked as soon as it has a token.
ROW_BY_ROW = (StopStringCriteria, MaxTimeCriteria)
_guard = threading.Lock()
_locks: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # by model: calls from several threads wait in line


def generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: Sequence[Any] | None = None,
    stopping_criteria: Sequence[Any] | None = None,
    generation_config: Any = None,
    synced_gpus: bool = False,
    streamer: Any = None,
    *,
    method: str = methods.DEFAULT,
    options: Mapping[str, Any] | None = None,
    max_slots: int = 32,
    cache_bytes: int = 4 << 30,
    strict: bool = False,
    **model_kwargs: Any,
) -> Any:
    """What `transformers` calls in place of its own decoding loop; returns what that would return.

    `method` and its `options` choose the speculation; give them to `model.generate` beside `custom_generate`, or with
    `functools.partial`. `max_slots` rows of a batch run at once, within `cache_bytes`. `strict` raises a drafter's
    error instead of going on without it. The runtime stays with the model for later calls; `release` frees it.
    """
    if generation_config is None:
        raise InputError("call model.generate(**inputs, custom_generate=outrider.generate), which prepares the inputs")
    dropped = dropped_arguments(model)
    streamer = dropped.get("streamer") if streamer is None else streamer
    refuse_model(model, states=bool(Mixers(model)))
    refuse_unsupported(model, generation_config, synced_gpus, dropped, model_kwargs)
    processors, criteria = list(logits_processor or ()), list(stopping_criteria or ())
    refuse_processors(processors)

    prompts = unpadded(input_ids, model_kwargs.get("attention_mask"), model_kwargs.get("position_ids"))
    width, longest = input_ids.shape[1], max(map(len, prompts))
    limit = min((c.max_length for c in criteria if type(c) is MaxLengthCriteria), default=None)
    wanted = context_limit(model.config)[0] if limit is None else longest + max(limit - width, 1)
    with _lock(model):
        session = _session(model, len(prompts), wanted, max_slots, cache_bytes)
        recipe = session.recipe(method, options or {}, strict)
        _check_room(model, longest, wanted, session.outrider.target.max_context)
        run = _Run(input_ids, prompts, processors, criteria, generation_config, streamer)
        run.go(session.outrider.engine, recipe, wanted - longest)
    return run.result()


def release(model: Any) -> None:
    """Free the cache and the drafters that earlier calls left with the model."""
    with _lock(model):
        session = vars(model).get(SESSION)
        if session is not None:
            session.outrider.close()
            del vars(model)[SESSION]


def unpadded(input_ids: Tensor, mask: Tensor | None, positions: Tensor | None) -> list[list[int]]:
    """Each row without its left padding; equal neighbours are one list, so that their prompt is run once."""
    if input_ids.dim() != 2 or 0 in input_ids.shape:
        raise InputError(f"input_ids has shape {tuple(input_ids.shape)}; give a batch of prompts of at least one token")
    real = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask.to(input_ids.device).bool()
    if real.shape != input_ids.shape or bool((real[:, :-1] & ~real[:, 1:]).any()) or not bool(real[:, -1].all()):
        raise InputError(
            "attention_mask hides tokens that are not padding on the left; pad with tokenizer.padding_side='left'"
        )
    by_mask = real.long().cumsum(-1) - 1
    if positions is not None:
        given = positions.to(input_ids.device)
        if given.dim() != 2 or given.shape[1] != input_ids.shape[1] or bool(((given != by_mask) & real).any()):
            raise InputError("position_ids do not count each row's tokens from 0; leave them out")
    prompts: list[list[int]] = []
    for row, length in zip(input_ids.tolist(), real.sum(-1).tolist(), strict=True):
        prompt = row[len(row) - length :]
        prompts.append(prompts[-1] if prompts and prompts[-1] == prompt else prompt)
    return prompts


def _check_room(model: Any, longest: int, wanted: int, room: int) -> None:
    """More than the context holds is refused beforehand: a text cut short in silence would not be the same output."""
    if longest < wanted <= room:
        return
    positions, reason = context_limit(model.config)
    by_bytes = room < min(positions, wanted)
    why, remedy = (
        ("cache_bytes allow no more", "raise cache_bytes") if by_bytes else (reason, "ask for fewer new tokens")
    )
    asked = f"{max(wanted - longest, 1)} new tokens"
    raise InputError(f"a prompt of {longest} tokens and {asked} pass the context of {room} ({why}); {remedy}")


@dataclass(slots=True, eq=False)
class _Row:
    """One row of the batch: what was decided for it, and how far it has come."""

    prompt: list[int]
    padding: list[int]
    processors: Processors | None
    output: list[int] = field(default_factory=list)
    scores: deque[Tensor] = field(default_factory=deque)  # [V] for each new token that is not settled
    logits: deque[Tensor] = field(default_factory=deque)
    length: int | None = None  # new tokens after which the criteria stopped it


class _Run:
    """One call: submits the rows, asks the criteria after every token, hands tokens to the streamer in step.

    Rows advance at different speeds, but a criterion may count its calls or compare rows: it is asked once a position
    with the whole batch, when the slowest row has got there. What other rows said past their stop is dropped.
    """

    def __init__(
        self, input_ids: Tensor, prompts: list[list[int]], processors: list[Any], criteria: list[Any], config: Any,
        streamer: Any,
    ) -> None:  # fmt: skip
        self.input_ids, self.config, self.streamer = input_ids, config, streamer
        self.sample = bool(config.do_sample)
        as_dict = bool(config.return_dict_in_generate)
        # [B, V] a settled position, where they were asked for
        self.scores: list[Tensor] | None = [] if as_dict and config.output_scores else None
        self.logits: list[Tensor] | None = [] if as_dict and config.output_logits else None
        self.keep = self.scores is not None or self.logits is not None
        width, batch = input_ids.shape[1], len(prompts)
        self.rows = [
            _Row(
                prompt, row[: width - len(prompt)],
                Processors(for_row(processors, i, batch), row[: width - len(prompt)], keep=self.keep, distrust=i == 0)
                if processors or self.keep else None,
            )
            for i, (prompt, row) in enumerate(zip(prompts, input_ids.tolist(), strict=True))
        ]  # fmt: skip
        self.max_length = min((c.max_length for c in criteria if type(c) is MaxLengthCriteria), default=None)
        self.eos = {int(i) for c in criteria if type(c) is EosTokenCriteria for i in c.eos_token_id.flatten()}
        self.row_criteria = StoppingCriteriaList(c for c in criteria if type(c) in ROW_BY_ROW)
        self.batch_criteria = StoppingCriteriaList(c for c in criteria if type(c) not in (*LOOKED_UP, *ROW_BY_ROW))
        # Without an end-of-text criterion transformers does not pad: rows that stopped go on until the last one stops.
        self.pads = any(hasattr(c, "eos_token_id") for c in criteria)
        self.pad = _pad_id(config)
        self.settled: list[list[int]] = []  # B tokens a position: all rows have come there and the criteria were asked
        self.ids = input_ids  # with the settled positions, where criteria read them
        self.streamed = 0

    def go(self, engine: Engine, recipe: Recipe, max_new_tokens: int) -> None:
        # The caller's generator decides, so that torch.manual_seed repeats a run; greedy leaves it untouched.
        seeds = torch.randint(2**63 - 1, (len(self.rows),)).tolist() if self.sample else [0] * len(self.rows)
        base = SamplingParams(temperature=1.0 if self.sample else 0.0, max_new_tokens=max_new_tokens)
        handles = []
        try:
            for row, seed in zip(self.rows, seeds, strict=True):
                handles.append(
                    engine.submit(
                        row.prompt, base.with_(seed=seed), recipe, constraint=row.processors,
                        stop_check=partial(self.token, row),
                    )
                )  # fmt: skip
            while not all(handle.done for handle in handles):
                engine.step()
                for row, handle in zip(self.rows, handles, strict=True):
                    if handle.done:
                        handle.results()  # raises at once what ended a row
                    elif self.ended(row):  # stopped by what another row said
                        handle.cancel()
                self.settle()
                self.stream()
        finally:
            for handle in handles:
                handle.cancel()
        for row in self.rows:
            row.length = len(row.output) if row.length is None else row.length  # the context ended before a criterion
        self.settle()
        self.stream()
        if self.streamer is not None:
            self.streamer.end()

    def token(self, row: _Row, text: Sequence[int]) -> bool:
        """Asked by the engine after every token of a row, wherever in an accepted run it stands."""
        tokens = np.asarray(text)
        row.output.append(int(tokens[-1]))
        if row.processors is not None and self.keep:
            raw, processed = row.processors.take(tokens[:-1])
            if self.scores is not None:
                row.scores.append(processed)
            if self.logits is not None:
                row.logits.append(raw)
        if row.length is None and self.stops(row, tokens):
            row.length = len(row.output)
        if self.batch_criteria:
            self.settle()
        return self.ended(row)

    def stops(self, row: _Row, tokens: NDArray[np.int64]) -> bool:
        """What can be said of a row without the others."""
        length = len(row.padding) + len(tokens)
        done = int(tokens[-1]) in self.eos or (self.max_length is not None and length >= self.max_length)
        if self.row_criteria:
            ids = torch.tensor([row.padding + tokens.tolist()], device=self.input_ids.device)
            done |= bool(self.row_criteria(ids, None).all())
        return done

    def settle(self) -> None:
        """Take every position that all rows have reached, in order, and ask as transformers would have asked there."""
        while True:
            at = len(self.settled)
            past = [row.length is not None and row.length <= at for row in self.rows]
            padded = past if self.pads else [False] * len(self.rows)
            if all(past) or any(len(row.output) <= at and not pad for row, pad in zip(self.rows, padded, strict=True)):
                return
            self.settled.append([self.pad if pad else r.output[at] for r, pad in zip(self.rows, padded, strict=True)])
            if self.scores is not None:
                self.scores.append(self.stacked([r.scores for r in self.rows], padded))
            if self.logits is not None:
                self.logits.append(self.stacked([r.logits for r in self.rows], padded))
            if self.batch_criteria:
                self.ids = torch.cat([self.ids, torch.tensor(self.settled[at:]).to(self.ids).T], dim=1)
                scores = None if self.scores is None else tuple(self.scores)
                for row, was, stop in zip(self.rows, past, self.batch_criteria(self.ids, scores).tolist(), strict=True):
                    if stop and not was:
                        row.length = at + 1

    def ended(self, row: _Row) -> bool:
        """Whether the row needs no more tokens."""
        if self.pads:
            return row.length is not None
        return all(other.length is not None for other in self.rows) and len(row.output) >= self.length

    def stream(self) -> None:
        """Tokens in step: one [B] tensor for each settled position."""
        if self.streamer is not None:
            for tokens in self.settled[self.streamed :]:
                self.streamer.put(torch.tensor(tokens))
            self.streamed = len(self.settled)

    @property
    def length(self) -> int:
        return max(row.length or 0 for row in self.rows)

    def result(self) -> Any:
        new = torch.tensor(self.settled).to(self.input_ids).T
        sequences = torch.cat([self.input_ids, new], dim=1)
        if not self.config.return_dict_in_generate:
            return sequences
        return GenerateDecoderOnlyOutput(
            sequences=sequences,
            scores=None if self.scores is None else tuple(self.scores),
            logits=None if self.logits is None else tuple(self.logits),
        )

    def stacked(self, kept: list[deque[Tensor]], padded: list[bool]) -> Tensor:
        """[B, V] of a position; a row that has ended has nothing to say there, which is zeros."""
        rows = [None if pad else queue.popleft() for queue, pad in zip(kept, padded, strict=True)]
        nothing = torch.zeros_like(next(row for row in rows if row is not None))
        return torch.stack([nothing if row is None else row for row in rows]).to(self.input_ids.device)


def _pad_id(config: Any) -> int:
    pad = getattr(config, "_pad_token_tensor", None)
    pad = config.pad_token_id if pad is None else pad
    return 0 if pad is None else int(pad)


class _Session:
    """A model's engine, as large as the calls so far needed, and the recipes they named."""

    def __init__(self, model: Any, slots: int, context: int, cache_bytes: int, of: tuple[Any, ...]) -> None:
        self.asked, self.of = (slots, context, cache_bytes), of
        name = model.name_or_path or type(model).__name__
        loaded = LoadedModel(model, None, name, frozenset(), fingerprint(model))
        limits = {"max_slots": slots, "max_context": context, "cache_bytes": cache_bytes}
        self.outrider = Outrider(loaded, "plain", limits=limits)
        self._recipes: dict[str, Recipe] = {}

    def recipe(self, method: str, options: Mapping[str, Any], strict: bool) -> Recipe:
        self.outrider.engine.strict = strict
        key = repr((method, sorted(options.items())))
        if key not in self._recipes:
            self._recipes[key] = self.outrider.recipe(method, options)
        return self._recipes[key]

    def __deepcopy__(self, memo: object) -> None:
        """A copy of the model begins without a session, and so does a pickled one."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def _session(model: Any, batch: int, context: int, max_slots: int, cache_bytes: int) -> _Session:
    """The model's session, made larger when a call needs more. It grows in powers of two, so rarely."""
    weight = model.get_input_embeddings().weight
    of = (weight.device, weight.dtype, tuple(weight.shape))  # a model that was moved or cast needs another cache
    slots = _power_of_two(min(batch, max(max_slots, 1)))
    context = min(_power_of_two(max(context, 256)), context_limit(model.config)[0])
    session: _Session | None = vars(model).get(SESSION)
    if session is not None and session.of == of and session.asked[2] == cache_bytes:
        slots, context = max(slots, session.asked[0]), max(context, session.asked[1])
        if session.asked == (slots, context, cache_bytes):
            return session
    release(model)
    session = vars(model)[SESSION] = _Session(model, slots, context, cache_bytes, of)
    return session


def _lock(model: Any) -> Any:
    with _guard:
        return _locks.setdefault(model, threading.RLock())


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()
