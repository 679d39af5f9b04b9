"""The command `outrider`: one small file a command, each a function of the file's name; no decoding logic here.

Standard output carries the result (text, a table or JSON) and nothing else; progress, statistics and errors go to
standard error. Heavy libraries are imported inside commands, so that `--help` and `--version` answer at once.
"""

from __future__ import annotations

import gc
from importlib import import_module
from typing import Annotated

import typer

from outrider._version import __version__
from outrider.cli.expand import expand
from outrider.cli.shell import FORCE, Shell, fit_help, prepare

# A new command: its file, and its name here.
USE, MEASURE, MAKE, KEEP = "Use a model", "Measure and prove", "Train, index and export", "This machine"
COMMANDS = {
    "generate": USE, "chat": USE, "batch": USE, "suggest": USE, "explain": USE, "demo": USE, "compare": MEASURE,
    "bound": MEASURE, "check": MEASURE, "methods": USE, "doctor": KEEP, "export": MAKE, "serve": USE,
}  # fmt: skip
GROUPS = {"train": (".train.commands", MAKE), "drafters": (".drafters", MAKE), "bench": (".bench", MEASURE),
          "index": (".index", MAKE), "cache": (".keep.cache", KEEP)}  # fmt: skip

app = typer.Typer(
    cls=Shell, add_completion=True, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip
for _name, _panel in COMMANDS.items():
    app.command(_name, rich_help_panel=_panel)(expand(getattr(import_module(f"outrider.cli.{_name}"), _name)))
for _name in ("sample", "find"):
    app.command(_name, rich_help_panel=USE)(expand(getattr(import_module(f"outrider.cli.conditional.{_name}"), _name)))
app.command("prepare", rich_help_panel=KEEP)(expand(import_module("outrider.cli.keep.prepare").prepare))
for _name, (_home, _panel) in GROUPS.items():
    app.add_typer(import_module(f"outrider.cli{_home}").app, name=_name, rich_help_panel=_panel)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"outrider {__version__}")
        raise typer.Exit


@app.callback()
def _outrider(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks and what libraries have to say.")] = False,
    force: Annotated[
        bool, typer.Option(FORCE, help="Overwrite files that Outrider did not write; may stand behind a command, too.")
    ] = False,
) -> None:
    """Makes a language model generate faster without changing what it generates."""
    prepare(debug, force)


def main() -> None:
    """The console script."""
    gc.set_threshold(100_000, 50, 100)  # starting makes many objects that all stay: looking for others is a sixth of it
    fit_help(app)
    app(prog_name="outrider")
