"""Commands in the pages are those of the program: they parse, and benchmarks that they run are there."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from outrider.cli import app
from outrider.cli.shell import fill_optional, force_first
from tests.docs.pages import FENCE, PAGES, ROOT, place

COMMAND = re.compile(r"^(?:\$ |ExecStart=\S*/)?outrider (.*)")
ENDS = {"|", "||", "&&", ";", "&", ">", ">>", "<", "2>"}  # what follows belongs to the shell
BENCHMARK = re.compile(r"\bpython (benchmarks/\S+\.py)([^`]*)")


def commands(page: str) -> Iterator[str]:
    """The arguments of every `outrider ...` in blocks of code and between backticks."""
    for block in FENCE.findall(page):
        for line in re.sub(r"\\?\n[ \t]+", " ", block).splitlines():
            if found := COMMAND.match(line):
                yield found[1]
    for span in re.findall(r"`outrider ([^`]+)`", FENCE.sub("", page)):
        yield span.replace("\n", " ")


def arguments(line: str) -> list[str]:
    """As the shell would split them; `...` stands for more of them, whatever they are."""
    found = shlex.split(line, comments=True) if " #" in f" {line}" else shlex.split(line)
    found = found[: next((i for i, part in enumerate(found) if part in ENDS), len(found))]
    more = re.search(r"(?<![\"'\w.])\.\.\.(?![\"'\w.])", line)
    return [part for part in found if part != "..."] if more else found


@cache
def program() -> Any:
    return typer.main.get_command(app)


def parse(args: list[str]) -> None:
    """Raises what the command line would say of these options and names; looks at no value, runs nothing."""
    command, context, rest = program(), None, force_first(fill_optional(args))
    while True:
        context = command.context_class(command, info_name=command.name, parent=context)
        given, rest, _ = command.make_parser(context).parse_args(list(rest))
        if "help" in given or not hasattr(command, "resolve_command"):
            break
        if not rest or set(rest[0]) <= {"."}:
            return
        for name in rest[0].split("|")[1:]:
            command.resolve_command(context, [name])
        _, command, rest = command.resolve_command(context, [rest[0].split("|")[0], *rest[1:]])
    if rest:
        raise ValueError(f"nobody takes {' '.join(rest)!r}")


@pytest.mark.parametrize("page", PAGES, ids=place)
def test_every_command_of_a_page_is_one_that_the_program_knows(page: Path) -> None:
    wrong = []
    for line in commands(page.read_text(encoding="utf-8")):
        try:
            parse(arguments(line))
        except Exception as error:  # of click, and of an open quote
            wrong.append(f"outrider {line}\n    {getattr(error, 'message', None) or error}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("line", "right"),
    [
        ("generate hi --stats --json", True),
        ("generate hi --statistics", False),
        ("train run --model M --data DATA -o layer=2", True),
        ("train walk", False),
        ("generat hi", False),
        ("cache list|clear", True),
        ("cache list|clean", False),
        ("doctor here", False),
        ("generate hi --method", False),
        ("train run --from SMALLER ...   # go on", True),
    ],
)
def test_commands_that_do_not_exist_are_seen(line: str, right: bool) -> None:
    if right:
        parse(arguments(line))
    else:
        with pytest.raises(Exception, match=r".+"):
            parse(arguments(line))


def benchmark_commands(page: str) -> Iterator[tuple[str, set[str]]]:
    """Every program of `benchmarks/` that a page runs, and the options it gives."""
    joined = re.sub(r"\\?\n[ \t]+", " ", page)
    spans = [line for block in FENCE.findall(joined) for line in block.splitlines()]
    spans += re.findall(r"`([^`]+)`", FENCE.sub("", page).replace("\n", " "))
    for found in filter(None, map(BENCHMARK.search, spans)):
        yield found[1], set(re.findall(r"(?<=\s)--[a-z][\w-]*", found[2].partition(" #")[0]))


def unknown_options(program: str, given: set[str]) -> list[str]:
    """Options that neither the program nor what programs share reads."""
    if not (ROOT / program).is_file():
        return [program]
    source = "".join((ROOT / file).read_text(encoding="utf-8") for file in (program, "benchmarks/common.py"))
    return [f"{program} {option}" for option in sorted(given) if f'"{option}"' not in source]


@pytest.mark.parametrize("page", PAGES, ids=place)
def test_every_benchmark_that_a_page_runs_is_there_and_has_its_options(page: Path) -> None:
    found = benchmark_commands(page.read_text(encoding="utf-8"))
    wrong = [what for program, given in found for what in unknown_options(program, given)]
    assert not wrong, f"not there: {', '.join(wrong)}"


@pytest.mark.parametrize("page", PAGES, ids=place)
def test_every_benchmark_that_a_page_names_is_there(page: Path) -> None:
    named = set(re.findall(r"\bbenchmarks/[\w/]+\.py", page.read_text(encoding="utf-8")))
    lost = sorted(name for name in named if not (ROOT / name).is_file())
    assert not lost, f"not there: {', '.join(lost)}"


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("```\npython benchmarks/company.py --limit 2\n```", []),
        ("run `python benchmarks/no_such.py` now", ["benchmarks/no_such.py"]),
        ("```\npython benchmarks/company.py \\\n    --planted 2\n```", ["benchmarks/company.py --planted"]),
    ],
)
def test_benchmarks_and_options_that_do_not_exist_are_seen(line: str, wrong: list[str]) -> None:
    assert [what for program, given in benchmark_commands(line) for what in unknown_options(program, given)] == wrong
