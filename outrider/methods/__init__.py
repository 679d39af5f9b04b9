"""Methods by name: the registry, and the recipes that wire parts into methods. What a plug-in needs is named here."""

from outrider.methods.registry import (
    DEFAULT,
    MethodInfo,
    Option,
    Options,
    Parts,
    build,
    check,
    find,
    option,
    parse_options,
    register,
    table,
)

__all__ = [
    "DEFAULT",
    "MethodInfo",
    "Option",
    "Options",
    "Parts",
    "build",
    "check",
    "find",
    "option",
    "parse_options",
    "register",
    "table",
]
