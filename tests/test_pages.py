"""The pages are held against the program: commands parse, links lead somewhere, every method is described."""

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
from outrider.methods import registry

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])
FENCE = re.compile(r"^```.*?^```", re.M | re.S)
COMMAND = re.compile(r"^(?:\$ |ExecStart=\S*/)?outrider (.*)")
ENDS = {"|", "||", "&&", ";", "&", ">", ">>", "<", "2>"}  # what follows belongs to the shell
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
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


def anchors(page: Path) -> set[str]:
    """The names that headings are linked by."""
    heads = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.M)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", head) for head in heads]
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_a_heading_that_exist(page: Path) -> None:
    broken = []
    for target in LINK.findall(re.sub(r"`[^`]*`", "", FENCE.sub("", page.read_text(encoding="utf-8")))):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        to = (page.parent / name).resolve() if name else page
        known = to.exists() and (not anchor or anchor in anchors(to))
        # the site has nothing but docs/
        inside = "docs" not in page.relative_to(ROOT).parts or to.is_relative_to(ROOT / "docs")
        if not (known and inside):
            broken.append(target)
    assert not broken, f"links that lead nowhere, or out of docs/: {', '.join(broken)}"


def test_every_method_stands_in_the_page_of_methods_with_a_file_that_exists() -> None:
    page = (ROOT / "docs/methods.md").read_text(encoding="utf-8")
    listed = dict(re.findall(r"^- `([\w-]+)`(?:, the default)?\s+\(`([\w/]+\.py)`", page, re.M))
    ours = {one.name for one in registry.table() if one.family != "planted"}
    assert ours <= set(listed), f"docs/methods.md lacks {', '.join(sorted(ours - set(listed)))}"
    lost = [file for file in listed.values() if not (ROOT / "outrider" / file).is_file()]
    assert not lost, f"docs/methods.md names files that are not there: {', '.join(lost)}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_in_a_page_is_python(page: Path) -> None:
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S):
        compile(block, str(page), "exec")
