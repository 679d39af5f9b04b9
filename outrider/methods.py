"""The registry of named methods: the only place that names concrete classes, imported when a method is built.

A method is a recipe (drafter x grower x verifier x controller) with typed options. To add one: write its file, then an
options dataclass, a build function and an entry here; a package of your own registers through the entry point group
`outrider.methods` or `register`.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import logging
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from outrider.errors import InputError, UnknownName
from outrider.protocols import Budget, Controller, Recipe, Target, Verifier

if typing.TYPE_CHECKING:
    from outrider.models import LoadedModel

log = logging.getLogger("outrider")
DEFAULT = "prompt-lookup"


@dataclass(frozen=True, slots=True)
class Parts:
    """What a method may be built from: the target, its model, and a way to run another model."""

    target: Target
    loaded: LoadedModel
    load: Callable[[str], LoadedModel]  # another model by name, on the target's device and in its precision
    runtime: Callable[[Any], Target]  # a model in a slot cache of its own, as large as the target's


@dataclass(frozen=True, slots=True)
class Option:
    name: str
    type: str
    default: Any
    help: str


@dataclass(frozen=True, slots=True)
class MethodInfo:
    name: str
    summary: str
    paper: str
    family: str
    lossless: bool
    needs: str  # what it needs besides the target: "nothing", "a draft model", "a corpus", "training"
    options: type
    build: Callable[[Parts, Any], Recipe]
    file: str = ""

    @property
    def option_list(self) -> list[Option]:
        hints = typing.get_type_hints(self.options)
        return [
            Option(f.name, _type_name(hints[f.name]), f.default, f.metadata.get("help", ""))
            for f in dataclasses.fields(self.options)
        ]

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "summary": self.summary,
            "paper": self.paper,
            "family": self.family,
            "lossless": self.lossless,
            "needs": self.needs,
            "file": self.file,
            "options": [dataclasses.asdict(option) for option in self.option_list],
        }


def option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


VerifierName = Literal["invariant", "rejection", "recursive"]
ControllerName = Literal["payoff", "fixed"]


@dataclass(frozen=True, slots=True)
class NoOptions:
    pass


@dataclass(frozen=True, slots=True)
class PromptLookupOptions:
    budget: int = option(16, "most candidates a step")
    max_ngram: int = option(3, "longest suffix that is looked up")
    min_ngram: int = option(1, "shortest suffix that is looked up")
    controller: ControllerName = option("payoff", "payoff: as much as has paid so far; fixed: the whole budget")
    verifier: VerifierName = option("invariant", "acceptance rule")


@dataclass(frozen=True, slots=True)
class DraftModelOptions:
    draft: str = option("", "draft model: hub id, folder or .gguf; empty: the target's own first layers")
    layers: int = option(0, "how many of the target's first layers draft, when no draft model is named; 0: a quarter")
    budget: int = option(5, "most candidates a step")
    width: int = option(256, "how many of the likeliest tokens a draft row keeps")
    controller: ControllerName = option("payoff", "payoff: as much as has paid so far; fixed: the whole budget")
    verifier: VerifierName = option("rejection", "acceptance rule; the invariant one drafts without sampling")


@dataclass(frozen=True, slots=True)
class AcceptNoneOptions:
    budget: int = option(16, "most candidates a step")
    controller: ControllerName = option("payoff", "payoff: as much as has paid so far; fixed: the whole budget")


def _plain(parts: Parts, options: NoOptions) -> Recipe:
    return Recipe("plain", None, _verifier("invariant"), _controller("fixed", 0))


def _prompt_lookup(parts: Parts, options: PromptLookupOptions) -> Recipe:
    from outrider.draft.prompt_lookup import PromptLookup

    _at_least("max_ngram", options.max_ngram, 1)
    if not 1 <= options.min_ngram <= options.max_ngram:
        raise InputError(f"option min_ngram is {options.min_ngram}; use 1..max_ngram ({options.max_ngram})")
    drafter = PromptLookup(options.max_ngram, options.min_ngram)
    controller = _controller(options.controller, options.budget)
    return Recipe("prompt-lookup", drafter, _verifier(options.verifier), controller)


def _draft_model(parts: Parts, options: DraftModelOptions) -> Recipe:
    from outrider.draft.grown import Grown
    from outrider.draft.model import ModelSource
    from outrider.grow.chain import Chain

    _at_least("width", options.width, 1)
    source = ModelSource(parts.runtime(_drafting_model(parts, options)), options.width)
    sampled = options.verifier != "invariant"
    controller = _controller(options.controller, options.budget)
    return Recipe("draft-model", Grown(source, Chain(), sampled), _verifier(options.verifier), controller)


def _accept_none(parts: Parts, options: AcceptNoneOptions) -> Recipe:
    from outrider.draft.unlikely import Unlikely

    return Recipe("accept-none", Unlikely(), _verifier("invariant"), _controller(options.controller, options.budget))


def _drafting_model(parts: Parts, options: DraftModelOptions) -> Any:
    from outrider.models import first_layers, same_vocabulary

    if options.draft:
        loaded = parts.load(options.draft)
        same_vocabulary(parts.loaded, loaded)
        return loaded.model
    total = int(parts.loaded.model.config.get_text_config().num_hidden_layers)
    layers = options.layers or max(total // 4, 1)
    if not 1 <= layers < total:
        raise InputError(f"option layers is {options.layers}; the target has {total}, use 1..{total - 1}")
    return first_layers(parts.loaded.model, layers)


def _verifier(name: str) -> Verifier:
    if name == "invariant":
        from outrider.verify.invariant import Invariant

        return Invariant()
    if name == "rejection":
        from outrider.verify.rejection import Rejection

        return Rejection()
    from outrider.verify.recursive import Recursive

    return Recursive()


def _controller(name: str, nodes: int) -> Controller:
    if name == "payoff":
        from outrider.control.payoff import Payoff

        _at_least("budget", nodes, 1)
        return Payoff(nodes)
    from outrider.control.fixed import Fixed

    _at_least("budget", nodes, 0)
    return Fixed(Budget(nodes, nodes))


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise InputError(f"option {name} is {value}; use {least} or more")


_METHODS: dict[str, MethodInfo] = {
    info.name: info
    for info in (
        MethodInfo(
            "plain", "no speculation: the target alone, through the same loop", "-", "baseline", True, "nothing",
            NoOptions, _plain, "engine.py",
        ),
        MethodInfo(
            "prompt-lookup", "copies what followed an earlier occurrence of the last tokens",
            "Saxena 2023; LLMA arXiv 2304.04487", "retrieval", True, "nothing",
            PromptLookupOptions, _prompt_lookup, "draft/prompt_lookup.py",
        ),
        MethodInfo(
            "draft-model", "a smaller model of the same vocabulary drafts a chain",
            "arXiv 2211.17192; arXiv 2302.01318", "model", True, "a draft model (default: the target's first layers)",
            DraftModelOptions, _draft_model, "draft/model.py",
        ),
        MethodInfo(
            "accept-none", "proposes what is never accepted: what speculation costs at worst", "-", "yardstick", True,
            "nothing", AcceptNoneOptions, _accept_none, "draft/unlikely.py",
        ),
    )
}  # fmt: skip
_plugins_loaded = False


def register(info: MethodInfo) -> None:
    """Add a method of your own, or replace one of the same name."""
    _METHODS[info.name] = info


def table() -> list[MethodInfo]:
    """Every known method, the ones of installed packages included."""
    _load_plugins()
    return list(_METHODS.values())


def find(name: str) -> MethodInfo:
    _load_plugins()
    if name not in _METHODS:
        raise UnknownName(f"unknown method {name!r}; known methods: {', '.join(_METHODS)}")
    return _METHODS[name]


def build(name: str, parts: Parts, options: Mapping[str, Any] | None = None) -> Recipe:
    info = find(name)
    made = parse_options(info, options or {})
    recipe = info.build(parts, made)
    if recipe.drafter is not None and recipe.drafter.shared_noise and recipe.verifier.coupled:
        raise InputError(
            f"method {name}: {recipe.drafter.name} draws with the target's own noise, which the rule "
            f"{recipe.verifier.name} cannot honour; use the invariant rule"
        )
    return dataclasses.replace(recipe, lossless=info.lossless, options=made)


def parse_options(info: MethodInfo, given: Mapping[str, Any]) -> Any:
    """Typed options from Python values or the strings of a command line."""
    hints = typing.get_type_hints(info.options)
    known = {f.name for f in dataclasses.fields(info.options)}
    values = {}
    for name, value in given.items():
        if name not in known:
            listed = ", ".join(sorted(known)) or "none"
            raise UnknownName(f"method {info.name} has no option {name!r}; its options: {listed}")
        values[name] = _convert(f"option {name} of {info.name}", value, hints[name])
    return info.options(**values)


def _convert(what: str, value: Any, kind: Any) -> Any:
    if typing.get_origin(kind) is Literal:
        choices = typing.get_args(kind)
        if value not in choices:
            raise InputError(f"{what} is {value!r}; use one of {', '.join(map(str, choices))}")
        return value
    if kind is bool:
        words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
        if isinstance(value, bool):
            return value
        if str(value).lower() in words:
            return words[str(value).lower()]
        raise InputError(f"{what} is {value!r}; use true or false")
    try:
        return kind(value)
    except (TypeError, ValueError):
        raise InputError(f"{what} is {value!r}; it must be a {_type_name(kind)}") from None


def _type_name(kind: Any) -> str:
    if typing.get_origin(kind) is Literal:
        return "|".join(map(str, typing.get_args(kind)))
    if isinstance(kind, types.UnionType):
        return str(kind)
    return str(getattr(kind, "__name__", kind))


def _load_plugins() -> None:
    global _plugins_loaded
    if _plugins_loaded:
        return
    _plugins_loaded = True
    for entry in importlib.metadata.entry_points(group="outrider.methods"):
        try:
            info = entry.load()
            for one in info if isinstance(info, list | tuple) else (info,):
                _METHODS.setdefault(one.name, one)
        except Exception as error:
            log.warning("the method plugin %s could not be loaded: %r", entry.name, error)
