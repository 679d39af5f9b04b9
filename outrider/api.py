"""What a user holds: a model, its tokenizer and an engine, with text in and text out.

Thin on purpose: encoding, chat templates, streaming and choice of method; every decision about tokens is the engine's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, Unpack

from outrider import methods, runtimes
from outrider.constrain.style import STRENGTH, Style
from outrider.engine import Engine, Handle
from outrider.errors import InputError
from outrider.generation import Generation
from outrider.inputs import Message, Prompt, checked_messages, checked_text, items_of, prompt_list, token_ids
from outrider.memory import collect, read_memory, recall, write_memory
from outrider.models import LoadedModel, load_model
from outrider.params import SamplingArguments, SamplingParams
from outrider.preflight import check_load
from outrider.protocols import Constraint, Needs, Recipe, Target
from outrider.text import token_decoder

log = logging.getLogger("outrider")
Result = TypeVar("Result")


def load(
    model: Any = "smollm2",
    method: str = methods.DEFAULT,
    *,
    options: Mapping[str, Any] | None = None,
    tokenizer: Any = None,
    device: str | None = None,
    dtype: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    max_slots: int = 8,
    max_context: int | None = None,
    cache_bytes: int = 4 << 30,
    strict: bool = False,
    memory: str | Path | None = None,
    runtime: str = runtimes.AUTO_NAME,
    precision: str | None = None,
) -> Outrider:
    """Make a model ready to generate with a method.

    `model` is the embedded "smollm2" (the default), a hub id, a folder, a .gguf file or a loaded transformers model;
    `method` ("mix") and its `options` are as `outrider methods` lists them. `tokenizer`, `device`, `dtype`, `revision`
    and `trust_remote_code` (False) are for loading.

    `max_slots` (8) sequences run at once and the rest wait. The cache is bounded by them, by `max_context` tokens a
    sequence (None: as many as the model can) and by `cache_bytes` (4 GiB). `strict` (False) raises a drafter's error
    instead of going on without it. `memory` (None) is a file in which drafters that learn find what they learnt before,
    and leave it on `close`. `runtime` ("auto") names what runs the model (`outrider doctor` lists them) and `precision`
    the form of its weights, where the runtime has several (None: as the model has them).
    """
    check_load(method, options, model=model, device=device, memory=memory, runtime=runtime, precision=precision)
    loaded = load_model(
        model, tokenizer=tokenizer, device=device, dtype=dtype, revision=revision, trust_remote_code=trust_remote_code
    )
    limits = {"max_slots": max_slots, "max_context": max_context, "cache_bytes": cache_bytes}
    made = Outrider(
        loaded, method, options, limits, strict=strict, trust_remote_code=trust_remote_code, memory=memory,
        runtime=runtime, precision=precision,
    )  # fmt: skip
    if precision is None:
        runtimes.advise(model, made.target, loaded.model)
    return made


class Outrider:
    """A loaded model with a default method; other methods can be asked for request by request."""

    def __init__(
        self, loaded: LoadedModel, method: str = methods.DEFAULT, options: Mapping[str, Any] | None = None,
        limits: Mapping[str, Any] | None = None, *, strict: bool = False, trust_remote_code: bool = False,
        memory: str | Path | None = None, runtime: str = runtimes.AUTO_NAME, precision: str | None = None,
    ) -> None:  # fmt: skip
        self.loaded, self.method = loaded, method
        self._memory = Path(memory) if memory is not None else None
        self._kept = read_memory(self._memory, loaded.fingerprint) if self._memory else {}
        limits = dict(limits or {})
        self.target: Target = runtimes.build(loaded.model, runtime, precision, **limits)
        self._parts = methods.Parts(
            self.target,
            loaded,
            lambda name: load_model(
                name, device=str(self.target.device), dtype=str(loaded.model.dtype).removeprefix("torch."),
                trust_remote_code=trust_remote_code,
            ),
            lambda model: runtimes.build_draft(
                model, self.target, **{**limits, "max_context": self.target.max_context}
            ),
        )  # fmt: skip
        self._needs = Needs()  # of all methods that were made ready
        self._recipes: dict[str, Recipe] = {method: self._build(method, options)}
        decode = token_decoder(loaded.tokenizer) if loaded.tokenizer is not None else None
        self.engine = Engine(
            self.target, self._recipes[method], eos_ids=loaded.eos_ids, decode=decode, strict=strict
        )  # fmt: skip
        # All async work in one thread: steps wait for each other whichever event loop asked for them.
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="outrider")

    @property
    def tokenizer(self) -> Any:
        if self.loaded.tokenizer is None:
            raise InputError("this model has no tokenizer; give token ids, or load it with tokenizer=...")
        return self.loaded.tokenizer

    def recipe(self, method: str | None = None, options: Mapping[str, Any] | None = None) -> Recipe:
        """The method made ready for this target: built once and kept, or afresh where options are given."""
        name = method or self.method
        if options:
            return self._build(name, options, kept=False)
        if name not in self._recipes:
            self._recipes[name] = self._build(name)
        return self._recipes[name]

    def _build(self, name: str, options: Mapping[str, Any] | None = None, kept: bool = True) -> Recipe:
        """`kept`: its memory will be saved, so one in the file that it cannot go on from is refused, not replaced."""
        recipe = methods.build(name, self._parts, options)
        try:
            for part in (recipe.controller, recipe.drafter):
                recall(part, self._kept)
        except InputError as error:
            if kept:
                raise InputError(f"{self._memory}: {error}") from error
            log.warning("%s: %s", self._memory, error)
        if recipe.drafter is not None:
            self._needs |= recipe.drafter.needs
            self.target.prepare((), recipe.drafter.needs)
        return recipe

    def save_memory(self, path: str | Path | None = None) -> None:
        """Keep what the drafters learnt, in `path` or the file that was given to `load`.

        Replaces a memory of this model, and no other file.
        """
        where = Path(path) if path is not None else self._memory
        if where is None:
            raise InputError("there is no file for the memory; give one here or to load(memory=...)")
        read_memory(where, self.loaded.fingerprint)
        recipes = self._recipes.values()
        self._kept |= collect(part for recipe in recipes for part in (recipe.drafter, recipe.controller))
        write_memory(where, self._kept, self.loaded.fingerprint)

    def style(self, path: str | Path, strength: float = STRENGTH) -> Style:
        """A style prior from a text file or a folder of them, to be given as `constraint`: it changes what is said."""
        return Style.from_file(path, self.tokenizer, self.target.vocab_size, strength)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a text, of chat messages (through the chat template), or of ids as they are."""
        if isinstance(prompt, str):
            if not prompt:
                raise InputError("the prompt is empty; give at least one character")
            return list(self.tokenizer(checked_text(prompt, "the prompt"))["input_ids"])
        items = items_of(prompt)
        return self.encode_chat(items) if items and isinstance(items[0], Mapping) else token_ids(items)

    def encode_chat(self, messages: str | Sequence[Message]) -> list[int]:
        """Token ids of chat messages through the chat template, up to where the answer begins; a text is one message.

        A message's content is a text or a list of text parts, `{"type": "text", "text": ...}`, joined by line ends.
        """
        checked = checked_messages([{"role": "user", "content": messages}] if isinstance(messages, str) else messages)
        if not getattr(self.tokenizer, "chat_template", None):
            raise InputError(f"{self.loaded.name} has no chat template; give a plain prompt instead")
        try:
            ids = self.tokenizer.apply_chat_template(
                checked, add_generation_prompt=True, tokenize=True, return_dict=False
            )
        except Exception as error:  # a template is a program with demands of its own, and fails in its own way
            why = " ".join(str(error).split())
            raise InputError(
                f"the chat template of {self.loaded.name} refuses these messages ({why}); check roles and their order"
            ) from error
        return list(ids)

    def submit(
        self, prompt: Prompt, params: SamplingParams | None = None, *, method: str | None = None,
        constraint: Constraint | None = None, **sampling: Unpack[SamplingArguments],
    ) -> Handle:  # fmt: skip
        """Queue a request; it runs as the engine is stepped. Arguments as of `generate`, for one prompt.

        A constraint changes what the model says; speculation is then exact with respect to the changed distribution.
        """
        made = self._params(params, sampling)
        return self.engine.submit(self.encode(prompt), made, self.recipe(method), constraint=constraint)

    def step(self) -> bool:
        """One step of every running request; True while there is more to do."""
        return self.engine.step()

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None, *,
        method: str | None = None, constraint: Constraint | None = None, **sampling: Unpack[SamplingArguments],
    ) -> list[Generation]:  # fmt: skip
        """All prompts in one ragged batch; n samples of a prompt stand next to each other.

        A prompt is a text, token ids or a list of chat messages. `params` is for all prompts, or a list with one for
        each; keyword arguments change them, or the defaults: greedy (`temperature=0`), at most 128 new tokens
        (`max_new_tokens`), one sample (`n`), a fresh `seed`. `help(outrider.SamplingParams)` has all, with units.
        `bad_words` and `prediction` may be texts here. `method` is the engine's unless named.
        """
        handles: list[Handle] = []
        try:
            self._submit_all(handles, prompts, params, method, constraint, sampling)
            return _results(handles)
        finally:
            _cancel(handles)

    async def agenerate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None, *,
        method: str | None = None, constraint: Constraint | None = None, **sampling: Unpack[SamplingArguments],
    ) -> list[Generation]:  # fmt: skip
        """The async twin of `generate`; several may run at once, with streams beside them, and share the batch.

        Any event loop will do, also several one after the other or in several threads. Cancelling the task cancels
        its requests.
        """
        handles: list[Handle] = []
        try:
            await self._apart(partial(self._submit_all, handles, prompts, params, method, constraint, sampling))
            while not await self._apart(partial(self._advance, handles)):
                pass
            return _results(handles)
        finally:
            _cancel(handles)

    def chat(
        self, messages: str | Sequence[Message], params: SamplingParams | None = None, *, method: str | None = None,
        constraint: Constraint | None = None, **sampling: Unpack[SamplingArguments],
    ) -> Generation:  # fmt: skip
        """The assistant's next message; a string is one user message. Other arguments as of `generate`: greedy and at
        most 128 new tokens by default."""
        prompt = self.encode_chat(messages)
        return self.generate([prompt], params, method=method, constraint=constraint, **sampling)[0]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, method: str | None = None,
        constraint: Constraint | None = None, **sampling: Unpack[SamplingArguments],
    ) -> Stream:  # fmt: skip
        """Pieces of text as they become certain; `generation` is there at the end. Arguments as of `generate`, for one
        prompt and one sample: greedy and at most 128 new tokens by default."""
        return Stream(self._single(prompt, params, method, constraint, sampling))

    async def astream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, method: str | None = None,
        constraint: Constraint | None = None, **sampling: Unpack[SamplingArguments],
    ) -> AsyncIterator[str]:  # fmt: skip
        """The async twin of `stream`; several may run at once and share the engine's batch, in any event loop."""
        handles: list[Handle] = []

        def advance() -> tuple[str, bool]:
            """Asked and answered between steps, so that a text that has ended is complete."""
            if not handles:
                handles.append(self._single(prompt, params, method, constraint, sampling))
            if not handles[0].ready:  # it may have been served by a step for another request
                self.engine.step()
            return handles[0].new_text(), handles[0].done

        try:
            done = False
            while not done:
                piece, done = await self._apart(advance)
                if piece:
                    yield piece
            _results(handles)  # raises what ended the request, if it was an error
        finally:
            _cancel(handles)

    def prepare(self, contexts: Sequence[int] = (512,)) -> None:
        """Get ready now what a runtime makes only once it has paid, for texts of so many tokens: for servers, or to
        measure. Takes seconds where there is something to make (OpenVINO compiles steps of fixed shapes)."""
        self.target.prepare(contexts, self._needs)

    def close(self) -> None:
        """Cancel what runs, free the cache, and keep the memory where a file was given for it."""
        self.engine.close()
        if self._memory is not None:
            self.save_memory()

    def __enter__(self) -> Outrider:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _single(
        self, prompt: Prompt, params: SamplingParams | None, method: str | None, constraint: Constraint | None,
        sampling: SamplingArguments,
    ) -> Handle:  # fmt: skip
        made = self._params(params, sampling)
        if made.n != 1:
            raise InputError(f"a stream carries one sample, not n={made.n}; submit and step, or generate")
        return self.engine.submit(self.encode(prompt), made, self.recipe(method), constraint=constraint)

    def _submit_all(
        self, handles: list[Handle], prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None, method: str | None, constraint: Constraint | None,
        sampling: SamplingArguments,
    ) -> None:  # fmt: skip
        """`handles` grows prompt by prompt: when one is refused, the caller finds those before it and cancels them."""
        items = prompt_list(prompts)
        recipe = self.recipe(method)
        if not isinstance(params, Sequence):
            each = [self._params(params, sampling)] * len(items)
        elif len(params) == len(items):
            each = [self._params(one, sampling) for one in params]
        else:
            counts = f"the number of prompts is {len(items)} and that of params {len(params)}"
            raise InputError(f"{counts}; give one SamplingParams for each prompt, or one for all")
        for number, (prompt, made) in enumerate(zip(items, each, strict=True), 1):
            with _named(f"prompt {number} of {len(items)}: " if len(items) > 1 else ""):
                handles.append(self.engine.submit(self.encode(prompt), made, recipe, constraint=constraint))

    def _advance(self, handles: Sequence[Handle]) -> bool:
        """One step where it is needed; whether these requests have ended."""
        if not all(handle.done for handle in handles):
            self.engine.step()
        return all(handle.done for handle in handles)

    async def _apart(self, job: Callable[[], Result]) -> Result:
        """Run a job in the worker's thread. A cancelled task still waits for it: the next finds the engine free."""
        running = asyncio.get_running_loop().run_in_executor(self._worker, job)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            while not running.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([running])
            raise

    def _params(self, params: SamplingParams | None, sampling: SamplingArguments) -> SamplingParams:
        """Keyword arguments change `params`, or the defaults; bad words and the prediction may be given as text."""
        if params is not None and not isinstance(params, SamplingParams):
            kind = type(params).__name__
            raise InputError(
                f"params is of type {kind}; give SamplingParams(...), or what they hold as keyword arguments "
                "(a list of them, one for each prompt, goes to generate)"
            )
        given = sampling.copy()
        expected, words = given.get("prediction"), given.get("bad_words")
        if isinstance(expected, str):
            given["prediction"] = self._ids(expected, "the prediction")
        if isinstance(words, Iterable) and not isinstance(words, str | bytes):
            given["bad_words"] = self._bad_words(words)
        return (params or SamplingParams()).with_(**given)

    def _ids(self, text: str, what: str) -> tuple[int, ...]:
        return tuple(self.tokenizer(checked_text(text, what), add_special_tokens=False)["input_ids"])

    def _bad_words(self, words: Iterable[str | Sequence[int]]) -> tuple[Sequence[int], ...]:
        """A word given as text is banned at the start of a text and after a space, which are different tokens."""
        out: list[Sequence[int]] = []
        for word in words:
            if isinstance(word, str):
                out += [self._ids(form, "a bad word") for form in (word, " " + word.lstrip())]
            else:
                out.append(word)
        return tuple(out)


class Stream:
    """Iterates over pieces of text; stopping early cancels the request."""

    def __init__(self, handle: Handle) -> None:
        self.handle = handle
        self._pieces = handle.pieces()

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        self._pieces.close()

    @property
    def generation(self) -> Generation:
        """Everything emitted so far; complete once the iteration has ended."""
        return self.handle.partial()[0]


def _results(handles: Sequence[Handle]) -> list[Generation]:
    return [generation for handle in handles for generation in handle.results()]


def _cancel(handles: Sequence[Handle]) -> None:
    """An interrupt or an error leaves nothing running; what has ended stays as it is."""
    for handle in handles:
        handle.cancel()


@contextmanager
def _named(name: str) -> Iterator[None]:
    """An input's error says which of several it was."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{name}{error}") from error.__cause__
