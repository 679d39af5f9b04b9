"""What is published works: the sdist holds all that the wheel needs, and the wheel alone starts, with its base
dependencies and none of the extras.

The empty environment borrows the distributions that `pip install outrider` would bring from the one that runs the
test: they are gigabytes, and the same files.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tomllib
import venv
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def run(*command: str | Path, cwd: Path, **extra: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [str(part) for part in command], cwd=cwd, env=kept | extra, capture_output=True, text=True, timeout=600
    )


def environment(folder: Path, pip: bool) -> Path:
    venv.create(folder, with_pip=pip)
    return folder / "bin"


def needed(requirements: list[str]) -> dict[str, Distribution]:
    """The distributions that these bring, theirs included, as far as they are installed here."""
    found: dict[str, Distribution] = {}
    open_ = [Requirement(text) for text in requirements]
    while open_:
        one = open_.pop()
        wanted = ["", *one.extras]
        if one.marker is not None and not one.marker.evaluate({"extra": ""}):
            continue
        try:
            dist = distribution(one.name)
        except PackageNotFoundError:
            continue  # of another platform
        if dist.name not in found:
            found[dist.name] = dist
            below = [Requirement(text) for text in dist.requires or ()]
            open_ += [r for r in below if r.marker is None or any(r.marker.evaluate({"extra": e}) for e in wanted)]
    return found


def lend(dists: dict[str, Distribution], place: Path) -> None:
    """The files of these distributions, as links."""
    for dist in dists.values():
        for top in {file.parts[0] for file in dist.files or () if not file.parts[0].startswith((".", "/"))}:
            source = Path(str(dist.locate_file(top)))
            if source.exists() and not (place / top).exists() and top != "__pycache__":
                (place / top).symlink_to(source)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the sdist, which is built from the tree."""
    place = tmp_path_factory.mktemp("dist")
    tools = environment(place / "tools", pip=True)
    got = run(tools / "python", "-m", "pip", "install", "-q", *PROJECT["build-system"]["requires"], cwd=place)
    if got.returncode:
        pytest.skip(f"needs a package index to build with: {got.stderr.strip().splitlines()[-1]}")
    made = run(tools / "python", "-m", "hatchling", "build", "-t", "sdist", "-d", place, cwd=ROOT)
    assert made.returncode == 0, made.stderr
    with tarfile.open(next(place.glob("outrider-*.tar.gz"))) as archive:
        archive.extractall(place / "sdist", filter="data")
    unpacked = next((place / "sdist").iterdir())
    made = run(tools / "python", "-m", "hatchling", "build", "-t", "wheel", "-d", place, cwd=unpacked)
    assert made.returncode == 0, made.stderr
    return next(place.glob("outrider-*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment that has the wheel and its base dependencies."""
    place = tmp_path_factory.mktemp("empty")
    programs = environment(place / "venv", pip=True)
    got = run(programs / "python", "-m", "pip", "install", "-q", "--no-deps", "--no-index", wheel, cwd=place)
    assert got.returncode == 0, got.stderr
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    lend(needed(PROJECT["project"]["dependencies"]), place / "venv" / "lib" / version / "site-packages")
    return programs


@pytest.mark.slow
def test_the_wheel_starts_in_an_empty_environment(installed: Path, tmp_path: Path) -> None:
    for arguments in (["--help"], ["methods"], ["doctor"]):
        got = run(installed / "outrider", *arguments, cwd=tmp_path, XDG_CACHE_HOME=str(tmp_path))
        assert got.returncode == 0, got.stderr
    where = run(installed / "python", "-c", "import outrider; print(outrider.__file__)", cwd=tmp_path)
    assert where.stdout.startswith(str(installed.parent))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder that needs no extra: random weights, and a token a byte."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytewise = Tokenizer(models.BPE(vocab={sign: i for i, sign in enumerate(alphabet)}, merges=[]))
    bytewise.pre_tokenizer, bytewise.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=bytewise).save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(alphabet), hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_the_wheel_generates_in_an_empty_environment(installed: Path, tiny: Path, tmp_path: Path) -> None:
    args = ("generate", "One, two,", "--raw", "--model", tiny, "-n", "8", "--json")
    got = run(installed / "outrider", *args, cwd=tmp_path, XDG_CACHE_HOME=str(tmp_path))
    assert got.returncode == 0, got.stderr
    assert len(json.loads(got.stdout)["generations"][0]["token_ids"]) == 8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        ("serve", "serve"),
        ("generate hi", "demo"),
        ("generate hi --runtime openvino", "openvino"),
        ("generate hi --raw --model tiny --choice a --choice b", "grammar"),
        ("compare --html page.html", "bench"),
        ("index build --corpus corpus --tokenizer tiny --out store", "retrieval"),
    ],
)
def test_what_an_extra_would_bring_is_named_in_one_line(
    installed: Path, tiny: Path, tmp_path: Path, arguments: str, extra: str
) -> None:
    (tmp_path / "tiny").symlink_to(tiny)
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "one.txt").write_text("One, two, three.\n" * 50)
    got = run(installed / "outrider", *arguments.split(), cwd=tmp_path, XDG_CACHE_HOME=str(tmp_path))
    errors = [line for line in got.stderr.splitlines() if line.startswith("error: ")]
    assert got.returncode == 2 and len(errors) == 1, got.stderr
    assert f"pip install 'outrider[{extra}]'" in errors[0] and "Traceback" not in got.stderr


@pytest.mark.slow
def test_the_wheel_holds_the_data_and_sources_that_are_read_while_running(wheel: Path) -> None:
    import zipfile

    held = set(zipfile.ZipFile(wheel).namelist())
    there = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "outrider").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert there - held == set()
