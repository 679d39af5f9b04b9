"""Writes docs/reference/commands.md from the command line itself: every command, what it does, what it is given.

python docs/scripts/commands.py           # writes the page; a test fails where it is not what this writes
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

PAGE = Path(__file__).resolve().parents[1] / "reference" / "commands.md"
WIDTH = 118
INTRO = """\
# Commands

`--help` behind a command has every option with its default. Options that several commands share:

- **Model and method**: `--model` (`smollm2`, a hub id, a folder, a `.gguf` file), `--method`, `--option name=value`,
  `--draft`.
- **Where it runs**: `--runtime`, `--precision`, `--device`, `--dtype`.
- **Sampling**: `--temperature`, `--top-p`, `--seed`, ... ([guide](../guides/sampling.md)).
- **Results**: `--json` prints to standard output, `--json FILE` writes. A file that Outrider did not write is
  overwritten only with `--force`.

Standard output carries the result and nothing else. The exit status is 0, 1 (refuted, or worse than asked), 2 (bad
input, said in one line with the remedy), or 130 (interrupted).
"""


def page() -> str:
    from outrider.cli import app

    panels: dict[str, list[str]] = {}
    for panel, name, told in commands(typer.main.get_command(app)):
        panels.setdefault(panel, []).append(_item(f"`outrider {name}`: {told}"))
    return "\n".join([INTRO, *(f"## {panel}\n\n" + "\n".join(lines) + "\n" for panel, lines in panels.items())])


def commands(program: Any, names: str = "", panel: str = "") -> Iterator[tuple[str, str, str]]:
    for name, command in program.commands.items():
        if command.hidden:
            continue
        where, whole = panel or command.rich_help_panel, f"{names} {name}".strip()
        if hasattr(command, "commands"):
            yield from commands(command, whole, where)
        else:
            yield where, whole, told(command.help)


def told(text: str | None) -> str:
    """The first sentence or so: what stands before the first empty line."""
    return re.sub(r"\s+", " ", (text or "").split("\n\n")[0]).strip()


def _item(text: str) -> str:
    return textwrap.fill(f"- {text}", WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
