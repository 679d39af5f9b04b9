"""Which slow tests have to run: the ones whose sources differ from those that they last passed with.

    python .ci/slow_tests.py                       # the files to run, in one line; empty: none
    python .ci/slow_tests.py --passed [FILE...]    # notes that these, or all slow tests, pass as things are now

The sources of a test file are itself, the `conftest.py` files above it, what it imports, at once or inside a function,
what that imports, and so on; besides, data of the package and how it is built. A test reaches modules by strings, too:
`monkeypatch.setattr("outrider.api.x", ...)`, `python -m outrider`, or folders of other tests that it runs again.
`import_module(f"outrider.cli.{name}")` is every module there; other names made while a program runs are not seen.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PASSED = Path(".ci/slow-tests-passed")  # a line a test file: the hash of its sources when it last passed; its path
TESTS = "tests"
ALWAYS = ("pyproject.toml", "Makefile", "outrider/data")
IN_STRINGS = re.compile(r"^outrider$|\b(?:outrider|tests)(?:[./]\w+)+[./]?")  # ends with a dot: put together there


def slow_tests(root: Path) -> list[Path]:
    """Test files with a test, or all of them, marked as slow."""
    files = sorted((root / TESTS).rglob("test_*.py"))
    return [path.relative_to(root) for path in files if any(map(_is_slow_mark, _nodes(path)))]


def _is_slow_mark(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "slow" and ast.unparse(node.value).endswith("mark")


def changed(root: Path) -> list[Path]:
    """Slow tests that have not passed with the sources that they have now."""
    passed = _passed(root)
    return [test for test in slow_tests(root) if passed.get(test) != content(root, test)]


def note_passed(root: Path, tests: list[Path]) -> None:
    """Keep the hashes of these tests, or of all; what is kept of files that have no slow tests any more goes."""
    slow = slow_tests(root)
    kept = _passed(root) | {test: content(root, test) for test in tests or slow}
    (root / PASSED).parent.mkdir(exist_ok=True)
    (root / PASSED).write_text("".join(f"{kept[test]}  {test.as_posix()}\n" for test in slow if test in kept))


def content(root: Path, test: Path) -> str:
    """A hash of the names and contents of all sources."""
    files = [f"{path} {hashlib.sha256((root / path).read_bytes()).hexdigest()}" for path in sorted(sources(root, test))]
    return hashlib.sha256("\n".join(files).encode()).hexdigest()[:32]


def sources(root: Path, test: Path) -> set[Path]:
    """Every file that the result of a test file may depend on, relative to the root."""
    found: set[tuple[Path, bool]] = set()
    waiting = {(root / test, True)}
    while waiting:
        found |= waiting
        waiting = {more for path, asked in waiting for more in _reached(root, path, asked)} - found
    paths = {path for path, _ in found}
    beside = {file for path in paths for file in path.parent.iterdir() if file.suffix not in (".py", ".pyc")}
    always = {file for name in ALWAYS for file in [root / name, *(root / name).rglob("*")]}
    return {path.relative_to(root) for path in paths | beside | always if path.is_file()}


@cache
def _reached(root: Path, path: Path, asked: bool) -> frozenset[tuple[Path, bool]]:
    """The files that one file leads to, each with whether it is asked for itself, not only as a package on the way.

    A package that is asked for may hand out by name what it does not import: then the strings in it count as well.
    """
    is_test = path.is_relative_to(root / TESTS)
    names = _imports(root, path) | _strings(path, everywhere=is_test or (asked and path.name == "__init__.py"))
    above = {(folder / "__init__.py", False) for folder in path.parents if folder.is_relative_to(root)}
    if is_test:
        above |= {(folder / "conftest.py", True) for folder in path.parents if folder.is_relative_to(root)}
    reached = {(file, True) for name in names for file in _files(root, name)} | above
    return frozenset(each for each in reached if each[0].is_file())


def _imports(root: Path, path: Path) -> set[str]:
    """Dotted names that a file imports, anywhere in it; `from a import b` is `a.b`, whether b is a module or not."""
    here = path.relative_to(root).with_suffix("").parts
    names: set[str] = set()
    for node in _nodes(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = [*here[: len(here) - node.level]] if node.level else []
            names |= {".".join([*base, *filter(None, [node.module]), alias.name]) for alias in node.names}
    return names


def _strings(path: Path, everywhere: bool) -> set[str]:
    """Dotted names and paths in strings: those that are imported by `import_module`, or all."""
    nodes = list(_nodes(path))
    if not everywhere:
        calls = [node for node in nodes if isinstance(node, ast.Call) and "import_module" in ast.unparse(node.func)]
        nodes = [inner for call in calls for inner in ast.walk(call)]
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    names = {name.replace("/", ".").removesuffix(".py") for text in texts for name in IN_STRINGS.findall(text)}
    return {"outrider.__main__" if name == "outrider" else name for name in names}  # as in `python -m outrider`


def _files(root: Path, name: str) -> list[Path]:
    """The module that a dotted name lies in; all below where it names a folder of tests, or ends with a dot."""
    parts = name.rstrip(".").split(".")
    if name.endswith(".") or (parts[0] == TESTS and root.joinpath(*parts).is_dir()):
        return sorted(root.joinpath(*parts).rglob("*.py"))
    for length in range(len(parts) if parts[0] in ("outrider", TESTS) else 0, 0, -1):
        module = root.joinpath(*parts[:length])
        if files := [path for path in (module.with_suffix(".py"), module / "__init__.py") if path.is_file()]:
            return files[:1]
    return []


@cache
def _nodes(path: Path) -> tuple[ast.AST, ...]:
    """The syntax tree of a file without what only type checkers read."""
    nodes: list[ast.AST] = [ast.parse(path.read_text())]
    for node in nodes:  # grows
        typing_only = isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        nodes += node.orelse if typing_only else ast.iter_child_nodes(node)
    return tuple(nodes)


def _passed(root: Path) -> dict[Path, str]:
    lines = (root / PASSED).read_text().splitlines() if (root / PASSED).is_file() else []
    return {Path(path): content for content, path in (line.split(maxsplit=1) for line in lines)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Which slow tests have to run.")
    parser.add_argument("--passed", nargs="*", type=Path, metavar="FILE", help="these passed; without any: all")
    given = parser.parse_args()
    if given.passed is None:
        print(*(test.as_posix() for test in changed(ROOT)))
    else:
        note_passed(ROOT, given.passed)


if __name__ == "__main__":
    main()
