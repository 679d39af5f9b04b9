"""The layout of the code: small files, folders that can be read at a glance, and at the root only what users import."""

from __future__ import annotations

import ast
import subprocess
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAX_LINES, MAX_FILES = 400, 20
SURFACE = {"__init__.py", "__main__.py", "_version.py", "api.py", "dropin.py", "py.typed"}


def tracked(*folders: str) -> list[Path]:
    """Files that git tracks; all of them where this is no checkout."""
    listed = subprocess.run(["git", "ls-files", *folders], cwd=ROOT, capture_output=True, text=True)
    names = listed.stdout.split("\n") if listed.returncode == 0 and listed.stdout else None
    if names is None:
        names = [str(p.relative_to(ROOT)) for folder in folders for p in (ROOT / folder).rglob("*") if p.is_file()]
        names = [name for name in names if "__pycache__" not in name]
    return [Path(name) for name in names if name and (ROOT / name).is_file()]


def test_no_file_is_longer_than_can_be_read_in_one_go() -> None:
    lines = {
        path: len((ROOT / path).read_text(encoding="utf-8").splitlines())
        for path in tracked("outrider", "tests", "benchmarks")
        if path.suffix == ".py"
    }
    long = [f"{path}: {count} lines" for path, count in lines.items() if count > MAX_LINES]
    assert not long, f"split these by concept, at most {MAX_LINES} lines each:\n" + "\n".join(long)


def test_no_folder_holds_more_files_than_can_be_seen_at_a_glance() -> None:
    files = Counter(path.parent for path in tracked("outrider", "tests", "benchmarks"))
    crowded = [f"{folder}: {count} files" for folder, count in files.items() if count > MAX_FILES]
    assert not crowded, f"sort these into folders of at most {MAX_FILES} files:\n" + "\n".join(crowded)


def test_the_root_of_the_package_holds_what_users_import_and_nothing_else() -> None:
    stray = sorted({path.name for path in tracked("outrider") if path.parent == Path("outrider")} - SURFACE)
    assert not stray, f"move these to the folder of their concept: {', '.join(stray)}"


def packages() -> list[Path]:
    folders = {path.parent for path in tracked("outrider") if path.suffix == ".py"}
    return sorted(folders | {parent for folder in folders for parent in folder.parents if parent != Path(".")})


@pytest.mark.parametrize("folder", packages(), ids=str)
def test_every_folder_says_what_it_is_in_a_sentence(folder: Path) -> None:
    init = ROOT / folder / "__init__.py"
    assert init.is_file(), f"{folder} has no __init__.py; write one with a sentence that says what the folder holds"
    said = ast.get_docstring(ast.parse(init.read_text(encoding="utf-8"))) or ""
    first = said.split("\n\n")[0].replace("\n", " ")
    assert len(first.split()) >= 3 and first.endswith("."), f"{init}: begin it with a plain sentence, not {first!r}"
