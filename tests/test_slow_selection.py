"""Slow tests run again exactly when something that they depend on has changed: on a small package made up here."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[1] / ".ci" / "slow_tests.py"
PACKAGE = {
    "pyproject.toml": "",
    "Makefile": "",
    "outrider/__init__.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from outrider.api import load\n"
    "HOMES = {'load': 'outrider.api'}\n",
    "outrider/__main__.py": "from outrider.cli import main\n",
    "outrider/api.py": "def load():\n    from outrider.engine import loop\n",
    "outrider/engine.py": "from . import tree\n",
    "outrider/tree.py": "TREE = 1\n",
    "outrider/kernels.py": "from pathlib import Path\n",
    "outrider/cli/__init__.py": "from importlib import import_module\n"
    "def main(name):\n    import_module(f'outrider.cli.{name}')\n",
    "outrider/cli/chat.py": "import outrider.api\n",
    "outrider/data/prompts.jsonl": "{}\n",
    "tests/conftest.py": "PROMPTS = []\n",
    "tests/toys.py": "import outrider.kernels\n",
    "tests/test_quick.py": "import outrider.cli.chat\n",
    "tests/test_tree.py": "import pytest\nfrom outrider.tree import TREE\n@pytest.mark.slow\ndef test_it(): ...\n",
    "tests/test_api.py": "import pytest\nimport outrider\npytestmark = pytest.mark.slow\n",
    "tests/test_shell.py": "import pytest\npytestmark = [pytest.mark.slow]\nCOMMAND = ['-m', 'outrider', 'chat']\n",
    "tests/deep/test_toys.py": "import pytest\nfrom tests.toys import outrider\npytestmark = pytest.mark.slow\n",
}
TREE, API, SHELL, TOYS = "tests/test_tree.py", "tests/test_api.py", "tests/test_shell.py", "tests/deep/test_toys.py"


def script() -> ModuleType:
    """Loaded anew: within one run files do not change."""
    spec = importlib.util.spec_from_file_location("slow_tests", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def changed(root: Path) -> set[str]:
    return {path.as_posix() for path in script().changed(root)}


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Everything has passed."""
    for name, text in PACKAGE.items():
        write(tmp_path, name, text)
    assert changed(tmp_path) == {TREE, API, SHELL, TOYS}
    script().note_passed(tmp_path, [])
    return tmp_path


def test_an_unchanged_tree_runs_none(root: Path) -> None:
    assert changed(root) == set()


@pytest.mark.parametrize(
    ("name", "tests"),
    [
        ("outrider/tree.py", {TREE, API, SHELL}),  # the api imports the engine inside a function, and that the tree
        ("outrider/api.py", {API, SHELL}),  # the package hands out `load` by name
        ("outrider/cli/chat.py", {SHELL}),  # `python -m outrider` finds its commands by name
        ("outrider/kernels.py", {TOYS}),  # through a helper of the tests
        ("outrider/__init__.py", {TREE, API, SHELL, TOYS}),
        ("outrider/data/prompts.jsonl", {TREE, API, SHELL, TOYS}),
        ("outrider/kernels.cu", {TREE, API, SHELL, TOYS}),  # what is compiled lies beside who reads it
        ("pyproject.toml", {TREE, API, SHELL, TOYS}),
        ("tests/conftest.py", {TREE, API, SHELL, TOYS}),
        ("tests/deep/conftest.py", {TOYS}),
        ("tests/test_tree.py", {TREE}),
        ("tests/test_quick.py", set()),
        ("docs/guide.md", set()),
    ],
)
def test_a_change_runs_the_tests_that_depend_on_it(root: Path, name: str, tests: set[str]) -> None:
    before = (root / name).read_text() if (root / name).exists() else ""
    write(root, name, before + "\n# changed\n")
    assert changed(root) == tests
    script().note_passed(root, [])
    assert changed(root) == set()


def test_a_new_slow_test_runs_and_one_that_is_gone_is_forgotten(root: Path) -> None:
    write(root, "tests/test_new.py", "import pytest\npytestmark = pytest.mark.slow\n")
    assert changed(root) == {"tests/test_new.py"}
    (root / TREE).unlink()
    script().note_passed(root, [Path("tests/test_new.py")])
    assert changed(root) == set()
    assert TREE not in (root / ".ci/slow-tests-passed").read_text()


def test_only_what_passed_is_noted(root: Path) -> None:
    write(root, "outrider/tree.py", "TREE = 2\n")
    script().note_passed(root, [Path(TREE)])
    assert changed(root) == {API, SHELL}


def test_tests_that_run_a_folder_of_others_depend_on_it(root: Path) -> None:
    write(root, "tests/test_bounds.py", "import pytest\npytestmark = pytest.mark.slow\nTESTS = ['tests/deep']\n")
    script().note_passed(root, [])
    write(root, "outrider/kernels.py", "CHANGED = True\n")
    assert changed(root) == {TOYS, "tests/test_bounds.py"}


def test_a_helper_that_mentions_slow_tests_is_none(root: Path) -> None:
    write(root, "tests/test_text.py", "TEXT = 'pytestmark = pytest.mark.slow'\n")
    assert changed(root) == set()
