"""`outrider suggest`: several short continuations of a text at once, as they grow."""

from outrider.cli.suggest.command import suggest

__all__ = ["suggest"]
