"""What a user holds: a model, its tokenizer and an engine behind `generate`, `chat`, `stream` and their async twins.

Thin on purpose: text in and out, streaming, memory and choice of method; every decision about tokens is the engine's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, Unpack

from outrider import methods
from outrider.constrain.grammar import Grammars
from outrider.constrain.style import STRENGTH, Style
from outrider.core.engine import Engine, Handle
from outrider.core.errors import InputError
from outrider.core.generation import Generation
from outrider.core.inputs import Message, Prompt, prompt_list
from outrider.core.params import SamplingArguments, SamplingParams
from outrider.core.protocols import Closes, CompileForm, Constraints, Recipe, Refreshes, Target
from outrider.core.records import NO_NEEDS, Needs
from outrider.core.schedule.stream import Stream as Stream
from outrider.core.text import token_decoder
from outrider.explain import Explanation, explain, traced
from outrider.methods.preflight import check_load
from outrider.models import LoadedModel, encoding, load_model
from outrider.models.files.phases import footprint, phase, recorded
from outrider.models.vocabulary import TokenizerBytes
from outrider.runtime import choice
from outrider.runtime.ranks.opening import opened
from outrider.store.keeping import Keeping, copied
from outrider.store.memory import Arrays

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
    cache_bytes: int | None = None,
    strict: bool = False,
    memory: str | Path | None = None,
    runtime: str = choice.AUTO_NAME,
    precision: str | None = None,
    grammar_backend: str = "auto",
    tensor_parallel: int = 1,
) -> Outrider:
    """Make a model ready to generate with a method.

    `model` is the embedded "smollm2" (the default), a hub id, a folder, a .gguf file or a loaded transformers model;
    `method` ("mix") and its `options` are as `outrider methods` lists them. `tokenizer`, `device`, `dtype`, `revision`
    and `trust_remote_code` (False) are for loading.

    `max_slots` (8) sequences run at once and the rest wait. The cache is bounded by them, by `max_context` tokens a
    sequence (None: as many as the model can) and by `cache_bytes` (None: most of what is free on the runtime native,
    which takes it as texts need it, half of what is free on a GPU, 4 GiB on others). What has run stays there until the
    room is wanted, so that a prompt that begins like it runs only the rest. `strict` (False) raises a drafter's error
    instead of going on without it. `memory` (None) is a file in which drafters that learn find what they learnt before,
    and leave it on `close`. `runtime` ("auto") names what runs the model (`outrider doctor` lists them) and `precision`
    the form of its weights, where the runtime has several (None: as the model has them). `grammar_backend` ("auto")
    compiles forms of texts: "xgrammar", or "llguidance" for what the first cannot hold to. `tensor_parallel` (1) is how
    many processes the model is spread over, a GPU each, by the plan that transformers has for it.
    """
    wanted: dict[str, Any] = {"runtime": runtime, "precision": precision}
    check_load(method, options, model=model, device=device, memory=memory, tensor_parallel=tensor_parallel, **wanted)
    limits = {"max_slots": max_slots, "max_context": max_context, "cache_bytes": cache_bytes}
    with recorded() as phases, opened(
        model, tensor_parallel, limits, tokenizer=tokenizer, device=device, dtype=dtype, revision=revision,
        trust_remote_code=trust_remote_code,
    ) as (loaded, target):  # fmt: skip
        if precision is None and dtype is None and target is None:
            wanted["precision"] = choice.nearest_precision(model, loaded, runtime)
        made = Outrider(
            loaded, method, options, limits, strict=strict, trust_remote_code=trust_remote_code, memory=memory,
            grammar_backend=grammar_backend, target=target, **wanted,
        )  # fmt: skip
    made.phases = phases
    if precision is None:
        choice.advise(model, made.target, loaded)
    return made


class Outrider:
    """A loaded model with a default method; other methods can be asked for request by request."""

    def __init__(
        self, loaded: LoadedModel, method: str = methods.DEFAULT, options: Mapping[str, Any] | None = None,
        limits: Mapping[str, Any] | None = None, *, strict: bool = False, trust_remote_code: bool = False,
        memory: str | Path | None = None, runtime: str = choice.AUTO_NAME, precision: str | None = None,
        grammar_backend: str = "auto", target: Target | None = None,
    ) -> None:  # fmt: skip
        """`target`: what runs the model, where it is made already."""
        self.loaded, self.method = loaded, method
        self.phases: dict[str, float] = {}  # seconds that the start took, by phase
        self._memory = Keeping(memory, loaded.fingerprint)
        limits = dict(limits or {})
        self.target = target or choice.build_loaded(loaded, runtime, precision, **limits)
        vocab_size = self.target.vocab_size
        self.compile_form: CompileForm = Grammars(
            lambda: TokenizerBytes(encoding.tokenizer_of(loaded), vocab_size), vocab_size, grammar_backend
        )  # from any thread: what was compiled before a request comes costs it nothing
        self._parts = methods.Parts(
            self.target,
            loaded,
            lambda name: load_model(
                name, device=str(self.target.device), dtype=str(loaded.dtype).removeprefix("torch."),
                trust_remote_code=trust_remote_code,
            ),
            lambda model: self._draft_target(model, limits),
        )  # fmt: skip
        self._draft_targets: list[tuple[Target, Any]] = []  # each with its model
        self._needs = Needs()  # of all methods that were made ready
        self._recipes: dict[str, Recipe] = {method: self._build(method, options)}
        decode = token_decoder(loaded.tokenizer) if loaded.tokenizer is not None else None
        self.engine = Engine(
            self.target, self._recipes[method], eos_ids=loaded.eos_ids, decode=decode, strict=strict,
            compile_form=self.compile_form,
        )  # fmt: skip
        # All async work in one thread: steps wait for each other whichever event loop asked for them.
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="outrider")

    def _draft_target(self, model: Any, limits: Mapping[str, Any]) -> Target:
        wanted = {**limits, "max_context": self.target.max_context}
        self._draft_targets.append((choice.build_draft(model, self.target, **wanted), model))
        return self._draft_targets[-1][0]

    @property
    def tokenizer(self) -> Any:
        return encoding.tokenizer_of(self.loaded)

    def recipe(self, method: str | None = None, options: Mapping[str, Any] | None = None) -> Recipe:
        """The method made ready for this target: built once and kept, or afresh where options are given."""
        name = method or self.method
        if options:
            return self._build(name, options, kept=False)
        if name not in self._recipes:
            self._recipes[name] = self._build(name)
        return self._recipes[name]

    def use_drafter(self, network: Any, kind: str = "") -> None:
        """Methods made ready from now on draft with this, a network of a trained `kind` or a causal language model."""
        self._parts.use_drafter(network, kind)

    def _build(self, name: str, options: Mapping[str, Any] | None = None, kept: bool = True) -> Recipe:
        with phase("drafters"):
            recipe = methods.build(name, self._parts, options)
        self._memory.recall((recipe.controller, recipe.drafter), kept)
        self.target.prepare((), needs := recipe.drafter.needs if recipe.drafter is not None else NO_NEEDS)
        self._needs |= needs
        return recipe

    def collect_memory(self) -> Arrays:
        """What the drafters know now, copied: to be saved while the engine goes on. Not beside a step."""
        return copied(part for recipe in self._recipes.values() for part in (recipe.drafter, recipe.controller))

    def save_memory(self, path: str | Path | None = None, arrays: Arrays | None = None) -> None:
        """Keep what the drafters learnt, in `path` or the file that was given to `load`; or what was collected of it.

        Replaces a memory of this model, and no other file.
        """
        self._memory.save(self.collect_memory() if arrays is None else arrays, path)

    def recall_memory(self) -> None:
        """Go on from what the file of `load` holds now, whoever wrote it. Not beside a step."""
        self._memory.read()
        for recipe in self._recipes.values():
            self._memory.recall((recipe.controller, recipe.drafter))

    def style(self, path: str | Path, strength: float = STRENGTH) -> Style:
        """A style prior from a text file or a folder of them, to be given as `constraint`: it changes what is said."""
        return Style.from_file(path, self.tokenizer, self.target.vocab_size, strength)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a text, of chat messages (through the chat template), or of ids as they are."""
        return encoding.encode(self.loaded, prompt)

    def encode_chat(self, messages: str | Sequence[Message], continue_final_message: bool = False) -> list[int]:
        """Token ids of chat messages through the chat template, up to where the answer begins; a text is one message.

        A message's content is a text or a list of text parts, `{"type": "text", "text": ...}`, joined by line ends.
        """
        return encoding.encode_chat(self.loaded, messages, continue_final_message)

    def submit(
        self, prompt: Prompt, params: SamplingParams | None = None, *, method: str | None = None,
        constraint: Constraints | None = None, **sampling: Unpack[SamplingArguments],
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
        method: str | None = None, constraint: Constraints | None = None, **sampling: Unpack[SamplingArguments],
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
        method: str | None = None, constraint: Constraints | None = None, **sampling: Unpack[SamplingArguments],
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
        constraint: Constraints | None = None, continue_final_message: bool = False,
        **sampling: Unpack[SamplingArguments],
    ) -> Generation:  # fmt: skip
        """The assistant's next message; a string is one user message. Other arguments as of `generate`: greedy and at
        most 128 new tokens by default. `continue_final_message`: the rest of a last message that has begun."""
        prompt = self.encode_chat(messages, continue_final_message)
        return self.generate([prompt], params, method=method, constraint=constraint, **sampling)[0]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, method: str | None = None,
        constraint: Constraints | None = None, **sampling: Unpack[SamplingArguments],
    ) -> Stream:  # fmt: skip
        """Pieces of text as they become certain; `generation` is there at the end. Arguments as of `generate`, for one
        prompt and one sample: greedy and at most 128 new tokens by default."""
        return Stream(self._single(prompt, params, method, constraint, sampling))

    async def astream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, method: str | None = None,
        constraint: Constraints | None = None, **sampling: Unpack[SamplingArguments],
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

    def explain(
        self, messages: str | Sequence[Message], params: SamplingParams | None = None, *, method: str | None = None,
        plain: bool = True, constraint: Constraints | None = None, **sampling: Unpack[SamplingArguments],
    ) -> Explanation:  # fmt: skip
        """The assistant's next message and a page of every step that made it: `save` writes it as one file, and a
        notebook shows it. `plain`: the same decoded plainly, too, to be shown beside it. Other arguments as of `chat`.
        """
        made = traced(self._params(params, sampling))
        names = [method or self.method, *(["plain"] if plain else [])]
        runs = [self.chat(messages, made, method=name, constraint=constraint) for name in names]
        return explain(runs, messages, made, token_decoder(self.tokenizer), self.loaded.name)

    def prepare(self, contexts: Sequence[int] = (512,)) -> None:
        """Get ready now what a runtime makes only once it has paid, for texts of so many tokens: for servers, or to
        measure. Takes seconds where there is something to make (OpenVINO compiles steps of fixed shapes)."""
        self.target.prepare(contexts, self._needs)

    def refresh(self) -> None:
        """Run the weights of `loaded.model` as they are now, changed in place; drafters of its layers follow."""
        for target, model in [(self.target, self.loaded.model), *self._draft_targets]:
            if not isinstance(target, Refreshes):
                raise InputError("a model that is spread over processes cannot be changed in place; load it again")
            target.refresh(model)

    def footprint(self) -> dict[str, int]:
        """Bytes of memory: the weights that steps read, what the cache may grow to, what this process took at most."""
        return footprint(self.target)

    def close(self) -> None:
        """Cancel what runs, free the cache, and keep the memory where a file was given for it."""
        self.engine.close()
        if self._memory.path is not None:
            self.save_memory()
        if isinstance(self.target, Closes):
            self.target.close()

    def __enter__(self) -> Outrider:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _single(
        self, prompt: Prompt, params: SamplingParams | None, method: str | None, constraint: Constraints | None,
        sampling: SamplingArguments,
    ) -> Handle:  # fmt: skip
        made = self._params(params, sampling)
        if made.n != 1:
            raise InputError(f"a stream carries one sample, not n={made.n}; submit and step, or generate")
        return self.engine.submit(self.encode(prompt), made, self.recipe(method), constraint=constraint)

    def _submit_all(
        self, handles: list[Handle], prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None, method: str | None, constraint: Constraints | None,
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
        return encoding.sampling_params(self.loaded, params, sampling)


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
