"""What is published: wheel and sdist are built, and the wheel alone gives a command that names what is missing.

Torch and its kin are not fetched again: the new environment sees the packages of this one but those of the extras.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LIGHT = ("typer", "rich", "platformdirs", "filelock")  # all that `--help` imports


def call(*command: str | Path, **more: Any) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **more)
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    return done


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of an environment with nothing in it."""
    folder = tmp_path_factory.mktemp("environment")
    call(sys.executable, "-m", "venv", folder)
    return folder / ("Scripts" if os.name == "nt" else "bin") / "python"


@pytest.fixture(scope="module")
def built(python: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    tools, dist = tmp_path_factory.mktemp("tools"), tmp_path_factory.mktemp("dist")
    pip = (python, "-m", "pip", "install", "-q", "--disable-pip-version-check")
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["build-system"]["requires"]
    call(*pip, "--target", tools, *wanted)
    call(python, "-m", "hatchling", "build", "-d", dist, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(tools)})
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    call(*pip, *[one for one in PROJECT["dependencies"] if re.match(r"[\w-]+", one)[0] in LIGHT])
    call(*pip, "--no-deps", wheel)
    return {"wheel": wheel, "sdist": sdist, "command": python.with_name("outrider"), "python": python}


def clean(**more: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | more


def test_the_wheel_has_the_package_and_its_data_and_the_sdist_what_tests_need(built: dict[str, Path]) -> None:
    held = set(zipfile.ZipFile(built["wheel"]).namelist())
    tracked = call("git", "ls-files", "outrider", cwd=ROOT).stdout.split()
    assert set(tracked) <= held
    assert not {name for name in held if name.split("/")[0] not in ("outrider", f"outrider-{version()}.dist-info")}
    with tarfile.open(built["sdist"]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "LICENSE", "tests/conftest.py", "examples/chat.py", "docs/index.md", "Makefile"} <= names


def version() -> str:
    return re.search(r'"(.+)"', (ROOT / "outrider" / "_version.py").read_text())[1]


def test_the_wheel_asks_for_what_the_project_says(built: dict[str, Path]) -> None:
    name = f"outrider-{version()}.dist-info/METADATA"
    said = zipfile.ZipFile(built["wheel"]).read(name).decode()
    asked = [line.removeprefix("Requires-Dist: ") for line in said.splitlines() if line.startswith("Requires-Dist")]
    assert sorted(one for one in asked if "extra ==" not in one) == sorted(PROJECT["dependencies"])
    assert set(re.findall(r"^Provides-Extra: (.+)$", said, re.MULTILINE)) == set(PROJECT["optional-dependencies"])


@pytest.mark.parametrize("args", ["--help", "--version", "generate --help", "train run --help"])
def test_help_needs_none_of_the_heavy_packages(built: dict[str, Path], args: str, tmp_path: Path) -> None:
    done = call(built["command"], *args.split(), cwd=tmp_path, env=clean())
    assert "outrider" in done.stdout.lower() and done.stderr == ""
    missing = "import importlib.util as u; print([m for m in ('torch', 'transformers', 'numpy') if u.find_spec(m)])"
    assert call(built["python"], "-c", missing, cwd=tmp_path, env=clean()).stdout == "[]\n"


@pytest.fixture(scope="module")
def without_extras(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packages of this environment but ours and those that only extras ask for."""
    optional = {re.match(r"[\w.-]+", one)[0] for extra in PROJECT["optional-dependencies"].values() for one in extra}
    hidden = {"outrider"}
    for name in optional - {re.match(r"[\w.-]+", one)[0] for one in PROJECT["dependencies"]}:
        try:
            files = importlib.metadata.files(name) or ()
        except importlib.metadata.PackageNotFoundError:
            continue
        hidden |= {file.parts[0] for file in files} - {"..", "__pycache__"}
    folder = tmp_path_factory.mktemp("packages")
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if path.name not in hidden and not path.name.startswith(("outrider-", "__editable__", "_outrider")):
            (folder / path.name).symlink_to(path)
    return folder


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


@pytest.mark.parametrize(
    ("args", "extra"),
    [
        ("generate hi", "demo"),
        ("generate hi --runtime openvino", "openvino"),
        ("generate hi --raw --model tiny --choice a --choice b", "grammar"),
        ("serve", "serve"),
        ("serve --replicas 2", "serve"),
        ("compare --html page.html", "bench"),
        ("index build --corpus corpus --tokenizer tiny --out store", "retrieval"),
    ],
)
def test_what_an_extra_brings_is_asked_for_by_its_name(
    built: dict[str, Path], without_extras: Path, tiny: Path, tmp_path: Path, args: str, extra: str
) -> None:
    (tmp_path / "tiny").symlink_to(tiny)
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "one.txt").write_text("One, two, three.\n" * 50)
    home = clean(PYTHONPATH=str(without_extras), XDG_CACHE_HOME=str(tmp_path / "cache"), HF_HUB_OFFLINE="1")
    done = subprocess.run([built["command"], *args.split()], capture_output=True, text=True, cwd=tmp_path, env=home)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 2 and len(errors) == 1, done.stdout + done.stderr
    assert f"pip install 'outrider[{extra}]'" in errors[0] and "Traceback" not in done.stderr


def test_the_wheel_alone_generates(built: dict[str, Path], without_extras: Path, tiny: Path, tmp_path: Path) -> None:
    home = clean(PYTHONPATH=str(without_extras), XDG_CACHE_HOME=str(tmp_path / "cache"), HF_HUB_OFFLINE="1")
    args = ("generate", "One, two,", "--raw", "--model", tiny, "-n", "8", "--json")
    made = json.loads(call(built["command"], *args, cwd=tmp_path, env=home).stdout)
    assert len(made["generations"][0]["token_ids"]) == 8
    where = call(built["python"], "-c", "import outrider; print(outrider.__file__)", cwd=tmp_path, env=home).stdout
    assert Path(where.strip()).is_relative_to(built["python"].parents[1])
