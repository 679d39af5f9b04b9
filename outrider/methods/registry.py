"""The registry of named methods: what there is, with typed options that Python and the command line can set.

A method is a recipe (drafter x grower x verifier x controller). Ours are listed in `recipes.py`; this folder is the
only place that names concrete classes. Other packages register through the entry point group `outrider.methods` or
`register`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import logging
import math
import os
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from outrider.core.errors import InputError, UnknownName, did_you_mean
from outrider.core.protocols import Recipe, Target
from outrider.core.records import Role
from outrider.methods.moved import PAGE, moved_import, old_signature

if typing.TYPE_CHECKING:
    from outrider.models import LoadedModel

log = logging.getLogger("outrider")
DEFAULT = "mix"


@dataclass(frozen=True, slots=True)
class Parts:
    """What a method may be built from: the target, its model, and a way to run another model."""

    target: Target
    loaded: LoadedModel
    load: Callable[[str], LoadedModel]  # another model by name, on the target's device and in its precision
    runtime: Callable[[Any], Target]  # a model in a slot cache of its own, as large as the target's
    drafts: dict[Any, Any] = field(default_factory=dict)  # draft models made so far, shared between methods
    cost: Any = None  # a `CostCurve` of the target's steps; None: measured when first asked for, and kept

    def use_drafter(self, network: Any, kind: str) -> None:
        """Changes `drafts`: what methods find where no drafter is named, of a trained kind or, without one, a model."""
        from outrider.methods.trained import KINDS

        if kind and kind not in KINDS:
            raise UnknownName(f"unknown kind {kind!r}; {did_you_mean(kind, KINDS)}known kinds: {', '.join(KINDS)}")
        self.drafts[(kind, "") if kind else ("", 0)] = network


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
    places: Callable[[Any], None] = lambda options: None  # refuses options that name a folder or file that is none
    role: Role = Role.FREE  # what it costs to ask its drafter as a part of a mixture
    samples: bool = False  # its candidates are drawn where the rule is coupled to the draft

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


@dataclass(frozen=True, slots=True)
class Options:
    """Of a method: a value out of its range is refused when it is set, which needs no model."""

    def __post_init__(self) -> None:
        for setting in dataclasses.fields(self):
            _check_range(setting.name, getattr(self, setting.name), **setting.metadata.get("range", {}))
        self.check()

    def check(self) -> None:
        """Refuse values that do not fit each other."""


def option(default: Any, help: str, *, least: float | None = None, most: float | None = None, remedy: str = "") -> Any:
    """A field of `Options`: what users are told of it, the numbers it takes, and what to say of others."""
    return field(default=default, metadata={"help": help, "range": {"least": least, "most": most, "remedy": remedy}})


def _check_range(
    name: str, value: Any, least: float | None = None, most: float | None = None, remedy: str = ""
) -> None:
    if isinstance(value, bool | str):
        return
    low, high = -math.inf if least is None else least, math.inf if most is None else most
    if not (math.isfinite(value) and low <= value <= high):
        spans = f"use {least:g} to {most:g}" if least is not None and most is not None else f"use {low:g} or more"
        raise InputError(f"option {name} is {value}; {remedy or spans}")


_METHODS: dict[str, MethodInfo] = {}
_loaded = False


def register(info: MethodInfo) -> None:
    """Add a method of your own, or replace one of the same name."""
    _load()
    _METHODS[info.name] = info


def table() -> list[MethodInfo]:
    """Every known method, the ones of installed packages included."""
    _load()
    return list(_METHODS.values())


def find(name: str) -> MethodInfo:
    _load()
    if name not in _METHODS:
        hint = did_you_mean(name, _METHODS)
        raise UnknownName(f"unknown method {name!r}; {hint}known methods: {', '.join(_METHODS)}")
    return _METHODS[name]


def check(name: str, options: Mapping[str, Any] | None = None) -> None:
    """Refuse what needs no model to be refused: a typo should not cost a model load."""
    info = find(name)
    info.places(parse_options(info, options or {}))


def build(name: str, parts: Parts, options: Mapping[str, Any] | None = None) -> Recipe:
    info = find(name)
    made = parse_options(info, options or {})
    recipe = info.build(parts, made)
    if changed := old_signature(recipe.drafter):
        raise InputError(f"method {name} was written for an earlier protocol: {changed}; see {PAGE}")
    if recipe.drafter is not None and recipe.drafter.shared_noise and recipe.verifier.coupled:
        raise InputError(
            f"method {name}: {recipe.drafter.name} draws with the target's own noise, which the rule "
            f"{recipe.verifier.name} cannot honour; use the invariant rule"
        )
    return dataclasses.replace(recipe, lossless=info.lossless, options=made)


def parse_options(info: MethodInfo, given: Mapping[str, Any]) -> Any:
    """Typed options from Python values or the strings of a command line."""
    hints = _hints(info.options)
    known = {f.name for f in dataclasses.fields(info.options)}
    values = {}
    for given_name, value in given.items():
        name = given_name.removeprefix(f"{info.name}.")  # `mix.drafter` is `drafter` of mix
        if name not in known:
            listed = ", ".join(sorted(known)) or "none"
            hint = did_you_mean(name, known)
            raise UnknownName(f"method {info.name} has no option {name!r}; {hint}its options: {listed}")
        values[name] = _convert(f"option {name} of {info.name}", value, hints[name])
    return info.options(**values)


@functools.cache
def _hints(options: type[Any]) -> dict[str, Any]:
    """The types of the fields; names in them are looked up, which takes longer than all the rest of a build."""
    return typing.get_type_hints(options)


def _convert(what: str, value: Any, kind: Any) -> Any:
    words = _words(kind)
    if isinstance(value, str) and value in words:
        return value
    if typing.get_origin(kind) is Literal:
        raise InputError(f"{what} is {value!r}; {did_you_mean(value, words)}use one of {', '.join(words)}")
    if kind is bool:
        meant = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
        if isinstance(value, bool):
            return value
        if str(value).lower() in meant:
            return meant[str(value).lower()]
        raise InputError(f"{what} is {value!r}; use true or false")
    wanted = next((number for number in typing.get_args(kind) if number in (int, float)), kind)  # of a number or a word
    try:
        if isinstance(value, bool) or (wanted is int and isinstance(value, float) and not value.is_integer()):
            raise ValueError
        if wanted is str and not isinstance(value, str | os.PathLike | int | float):
            raise TypeError
        return wanted(value)
    except (TypeError, ValueError, OverflowError):
        raise InputError(f"{what} is {value!r}; it must be {' or '.join([_article(wanted), *words])}") from None


def _words(kind: Any) -> list[str]:
    """What may be said in words: the choices of a Literal, alone or beside a number."""
    literals = [kind, *typing.get_args(kind)]
    return [word for literal in literals if typing.get_origin(literal) is Literal for word in typing.get_args(literal)]


def _article(kind: Any) -> str:
    return {int: "a whole number", float: "a number", str: "text"}.get(kind, f"a {_type_name(kind)}")


def _type_name(kind: Any) -> str:
    if words := _words(kind):
        numbers = [number.__name__ for number in typing.get_args(kind) if isinstance(number, type)]
        return "|".join([*numbers, *words])
    if isinstance(kind, types.UnionType):
        return str(kind)
    return str(getattr(kind, "__name__", kind))


def _load() -> None:
    """Our own recipes and those of installed packages, once; a broken package is named and left out."""
    global _loaded
    if _loaded:
        return
    _loaded = True
    from outrider.methods.recipes import RECIPES

    _METHODS.update((info.name, info) for info in RECIPES)
    for entry in importlib.metadata.entry_points(group="outrider.methods"):
        try:
            info = entry.load()
            for one in info if isinstance(info, list | tuple) else (info,):
                _METHODS.setdefault(one.name, one)
        except Exception as error:
            log.warning("the method plugin %s could not be loaded: %s", entry.name, moved_import(error) or repr(error))
