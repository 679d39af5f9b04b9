"""What a user holds: a model, its tokenizer and an engine, with text in and text out.

Thin on purpose: encoding, chat templates, streaming and choice of method; every decision about tokens is the engine's.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from outrider import methods, runtimes
from outrider.constrain.style import STRENGTH, Style
from outrider.engine import Engine, Handle
from outrider.errors import InputError
from outrider.generation import Generation
from outrider.memory import collect, read_memory, recall, write_memory
from outrider.models import LoadedModel, load_model
from outrider.protocols import Constraint, Needs, Prepares, Recipe, Target
from outrider.sampling import SamplingParams
from outrider.text import token_decoder

Message = Mapping[str, Any]
Prompt = str | Sequence[int]


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

    `model` is the embedded "smollm2", a hub id, a folder, a .gguf file or a loaded transformers model. `options` are
    the method's own (`outrider methods` lists them). `max_slots` sequences run at once and the rest wait; the cache is
    bounded by them, by `max_context` positions a sequence and by `cache_bytes`. `strict` raises a drafter's error
    instead of going on without it. `memory` is a file in which drafters that learn find what they learnt before, and
    leave it on `close`. `runtime` names what runs the model (`outrider doctor` lists them) and `precision` the form of
    its weights, where the runtime has several.
    """
    methods.parse_options(methods.find(method), options or {})  # a typo should not cost a model load
    runtimes.check(runtime, precision)
    loaded = load_model(
        model, tokenizer=tokenizer, device=device, dtype=dtype, revision=revision, trust_remote_code=trust_remote_code
    )
    limits = {"max_slots": max_slots, "max_context": max_context, "cache_bytes": cache_bytes}
    return Outrider(
        loaded, method, options, limits, strict=strict, trust_remote_code=trust_remote_code, memory=memory,
        runtime=runtime, precision=precision,
    )  # fmt: skip


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
        self._async_turn = asyncio.Lock()

    @property
    def tokenizer(self) -> Any:
        if self.loaded.tokenizer is None:
            raise InputError("this model has no tokenizer; give token ids, or load it with tokenizer=...")
        return self.loaded.tokenizer

    def recipe(self, method: str | None = None, options: Mapping[str, Any] | None = None) -> Recipe:
        """The method made ready for this target: built once and kept, or afresh where options are given."""
        name = method or self.method
        if options:
            return self._build(name, options)
        if name not in self._recipes:
            self._recipes[name] = self._build(name)
        return self._recipes[name]

    def _build(self, name: str, options: Mapping[str, Any] | None = None) -> Recipe:
        recipe = methods.build(name, self._parts, options)
        recall(recipe.drafter, self._kept)
        if recipe.drafter is not None:
            self._needs |= recipe.drafter.needs
            if isinstance(self.target, Prepares):
                self.target.prepare((), recipe.drafter.needs)
        return recipe

    def save_memory(self, path: str | Path | None = None) -> None:
        """Keep what the drafters learnt, in `path` or the file that was given to `load`."""
        where = Path(path) if path is not None else self._memory
        if where is None:
            raise InputError("there is no file for the memory; give one here or to load(memory=...)")
        self._kept |= collect(recipe.drafter for recipe in self._recipes.values())
        write_memory(where, self._kept, self.loaded.fingerprint)

    def style(self, path: str | Path, strength: float = STRENGTH) -> Style:
        """A style prior from a text file or a folder of them, to be given as `constraint`: it changes what is said."""
        return Style.from_file(path, self.tokenizer, self.target.vocab_size, strength)

    def encode(self, prompt: Prompt | Sequence[Message]) -> list[int]:
        """Token ids of a text, of chat messages (through the chat template), or of ids as they are."""
        if isinstance(prompt, str):
            if not prompt:
                raise InputError("the prompt is empty; give at least one character")
            return list(self.tokenizer(prompt)["input_ids"])
        try:
            items = list(prompt)
            if items and isinstance(items[0], Mapping):
                return self.encode_chat(cast(list[Message], items))
            return [int(cast(int, item)) for item in items]
        except (TypeError, ValueError):
            kind = type(prompt).__name__
            raise InputError(f"cannot use a {kind} as a prompt; give a text, token ids or chat messages") from None

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        if not messages:
            raise InputError("there are no chat messages; give at least one")
        if not getattr(self.tokenizer, "chat_template", None):
            raise InputError(f"{self.loaded.name} has no chat template; give a plain prompt instead")
        ids = self.tokenizer.apply_chat_template(
            [dict(m) for m in messages], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        return list(ids)

    def submit(
        self, prompt: Prompt | Sequence[Message], params: SamplingParams | None = None, *, method: str | None = None,
        constraint: Constraint | None = None, **sampling: Any,
    ) -> Handle:  # fmt: skip
        """Queue a request; it runs as the engine is stepped. Parameters, method and constraint are the request's own.

        A constraint changes what the model says; speculation is then exact with respect to the changed distribution.
        """
        made = self._params(params, sampling)
        return self.engine.submit(self.encode(prompt), made, self.recipe(method), constraint=constraint)

    def step(self) -> bool:
        """One step of every running request; True while there is more to do."""
        return self.engine.step()

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | None = None, *, method: str | None = None,
        constraint: Constraint | None = None, **sampling: Any,
    ) -> list[Generation]:  # fmt: skip
        """All prompts in one ragged batch; n samples of a prompt stand next to each other."""
        made = self._params(params, sampling)
        recipe = self.recipe(method)
        handles = [
            self.engine.submit(self.encode(p), made, recipe, constraint=constraint) for p in _prompt_list(prompts)
        ]
        try:
            return [generation for handle in handles for generation in handle.results()]
        finally:
            for handle in handles:  # an interrupt leaves nothing running
                handle.cancel()

    def chat(
        self, messages: str | Sequence[Message], params: SamplingParams | None = None, *, method: str | None = None,
        constraint: Constraint | None = None, **sampling: Any,
    ) -> Generation:  # fmt: skip
        """The assistant's next message; a string is one user message."""
        prompt = self.encode_chat(_messages(messages))
        return self.generate([prompt], params, method=method, constraint=constraint, **sampling)[0]

    def stream(
        self, prompt: Prompt | Sequence[Message], params: SamplingParams | None = None, *, method: str | None = None,
        constraint: Constraint | None = None, **sampling: Any,
    ) -> Stream:  # fmt: skip
        """Pieces of text as they become certain; `generation` is there at the end."""
        return Stream(self._single(prompt, params, method, constraint, sampling))

    async def astream(
        self, prompt: Prompt | Sequence[Message], params: SamplingParams | None = None, *, method: str | None = None,
        constraint: Constraint | None = None, **sampling: Any,
    ) -> AsyncIterator[str]:  # fmt: skip
        """The async twin of `stream`; several may run at once and share the engine's batch."""
        async with self._async_turn:
            handle = self._single(prompt, params, method, constraint, sampling)
        try:
            while True:
                if piece := handle.new_text():
                    yield piece
                elif handle.done:
                    handle.results()
                    return
                else:
                    async with self._async_turn:
                        if not handle.done:
                            await _in_thread(self.engine.step)
        finally:
            handle.cancel()

    def prepare(self, contexts: Sequence[int] = (512,)) -> None:
        """Get ready now what a runtime makes only once it has paid, for texts of so many tokens: for servers, or to
        measure. Takes seconds where there is something to make (OpenVINO compiles steps of fixed shapes)."""
        if isinstance(self.target, Prepares):
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
        self, prompt: Prompt | Sequence[Message], params: SamplingParams | None, method: str | None,
        constraint: Constraint | None, sampling: dict[str, Any],
    ) -> Handle:  # fmt: skip
        made = self._params(params, sampling)
        if made.n != 1:
            raise InputError(f"a stream carries one sample, not n={made.n}; submit and step, or generate")
        return self.engine.submit(self.encode(prompt), made, self.recipe(method), constraint=constraint)

    def _params(self, params: SamplingParams | None, sampling: Mapping[str, Any]) -> SamplingParams:
        """Keyword arguments change `params`, or the defaults; bad words and the prediction may be given as text."""
        given = dict(sampling)
        if isinstance(given.get("prediction"), str):
            given["prediction"] = tuple(self.tokenizer(given["prediction"], add_special_tokens=False)["input_ids"])
        if any(isinstance(word, str) for word in given.get("bad_words", ())):
            given["bad_words"] = self._bad_words(given["bad_words"])
        try:
            return dataclasses.replace(params or SamplingParams(), **given)
        except TypeError:
            known = {f.name for f in dataclasses.fields(SamplingParams)}
            wrong = ", ".join(sorted(set(given) - known)) or "a value"
            raise InputError(f"unknown sampling parameter {wrong}; known: {', '.join(sorted(known))}") from None

    def _bad_words(self, words: Sequence[str | Sequence[int]]) -> tuple[tuple[int, ...], ...]:
        """A word is banned at the start of a text and after a space, which are different tokens."""
        out: list[tuple[int, ...]] = []
        for word in words:
            if isinstance(word, str):
                forms = (word, " " + word.lstrip())
                out += [tuple(self.tokenizer(form, add_special_tokens=False)["input_ids"]) for form in forms]
            else:
                out.append(tuple(word))
        return tuple(dict.fromkeys(out))


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


async def _in_thread(step: Callable[[], object]) -> None:
    """A cancelled task still waits for the step it began, so that the next one finds the engine free."""
    running = asyncio.ensure_future(asyncio.to_thread(step))
    try:
        await asyncio.shield(running)
    except asyncio.CancelledError:
        await running
        raise


def _prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    items = list(prompts)
    if not items:
        raise InputError("there are no prompts; give at least one")
    if isinstance(items[0], int):
        return [cast(Sequence[int], items)]
    return cast(list[Prompt], items)


def _messages(messages: str | Sequence[Message]) -> Sequence[Message]:
    return [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
