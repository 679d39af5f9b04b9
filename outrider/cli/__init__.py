"""The command `outrider`: one small file a command, each a function of the file's name; no decoding logic here.

Standard output carries the result (text, a table or JSON) and nothing else; progress, statistics and errors go to
standard error. Heavy libraries are imported inside commands, so that `--help` and `--version` answer at once.
"""

from __future__ import annotations

from importlib import import_module
from typing import Annotated

import typer

from outrider._version import __version__
from outrider.cli.expand import expand
from outrider.cli.shell import FORCE, Shell, prepare

# A new command: its file, and its name here.
COMMANDS = ("generate", "chat", "demo", "compare", "bound", "check", "methods", "doctor", "export")

app = typer.Typer(
    cls=Shell, add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip
for _name in COMMANDS:
    app.command(_name)(expand(getattr(import_module(f"outrider.cli.{_name}"), _name)))
app.add_typer(import_module("outrider.cli.train").app, name="train")
app.add_typer(import_module("outrider.cli.drafters").app, name="drafters")
app.add_typer(import_module("outrider.cli.bench").app, name="bench")
app.add_typer(import_module("outrider.cli.index").app, name="index")


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
    app(prog_name="outrider")
