"""A model that was loaded once starts without `transformers`, and only as long as its files are the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

import outrider
from outrider.models import known
from outrider.models.known import identity_of_files, open_model
from outrider.models.quick_tokenizer import QuickTokenizer, note
from tests.models.tiny_gguf import tiny_gguf_model, write_gguf

SECOND = """
import sys, outrider
with outrider.load({folder!r}, runtime="native", max_context=64) as engine:
    ids = engine.generate([[3, 4, 5]], max_new_tokens=6)[0].token_ids
    more = engine.chat("ab", max_new_tokens=2).token_ids
print(*ids, *more, "transformers" in sys.modules, "torch._dynamo" in sys.modules)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small model with its tokenizer, and a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "tiny.gguf"
    model = tiny_gguf_model()
    write_gguf(model, file, packed=False)
    model.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def started(folder: Path) -> list[str]:
    script = SECOND.format(folder=str(folder))
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()


def test_a_second_start_says_the_same_without_transformers_and_the_compiler_of_torch(folder: Path) -> None:
    first, second = started(folder), started(folder)
    assert first[-2] == "True"
    assert second[-2:] == ["False", "False"]
    assert second[:-2] == first[:-2]


def test_weights_that_changed_are_read_again(folder: Path) -> None:
    before = started(folder)
    model = tiny_gguf_model()
    model.get_input_embeddings().weight.mul_(-1)
    model.save_pretrained(folder)
    after = started(folder)
    assert after[-2] == "True" and after[:-2] != before[:-2]


def test_a_torn_entry_is_made_again(folder: Path) -> None:
    identity = identity_of_files(folder)
    assert identity is not None
    open_model(folder)
    entry = known.known_folder() / identity / known.FACTS
    assert not open_model(folder).in_memory
    entry.write_text("{")
    open_model(folder)
    assert json.loads(entry.read_text())["outrider"] == outrider.__version__
    assert not open_model(folder).in_memory


def test_the_model_is_read_when_somebody_asks_for_it_and_can_be_given_back(folder: Path) -> None:
    open_model(folder)
    loaded = open_model(folder)
    assert loaded.dtype == loaded.model.dtype and loaded.in_memory
    loaded.forget()
    assert not loaded.in_memory and loaded.model.config.vocab_size == 32


def test_another_version_knows_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = identity_of_files(folder)
    monkeypatch.setattr(known, "__version__", "0.0.0")
    assert identity_of_files(folder) != before


def test_the_quick_tokenizer_answers_as_the_full_one(folder: Path, tmp_path: Path) -> None:
    full: Any = AutoTokenizer.from_pretrained(folder)
    full.chat_template = "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}\n{% endfor %}"
    facts = note(full, tmp_path)
    assert facts is not None
    quick = QuickTokenizer(tmp_path, json.loads(json.dumps(facts)), lambda: pytest.fail("the full one is not needed"))
    options: dict[str, Any] = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
    for text in ("abc th", "<s>ab", ""):
        assert quick(text)["input_ids"] == full(text)["input_ids"]
        assert quick.encode(text, add_special_tokens=False) == full.encode(text, add_special_tokens=False)
        assert quick.decode(full.encode(text), **options) == full.decode(full.encode(text), **options)
    names = ["ab", "<s>", "not a token"]
    assert quick.convert_tokens_to_ids(names) == full.convert_tokens_to_ids(names)
    assert quick.convert_ids_to_tokens([0, 5]) == full.convert_ids_to_tokens([0, 5])
    assert quick.get_vocab() == full.get_vocab() and len(quick) == len(full)
    said = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "th"}]
    for options in ({"add_generation_prompt": True}, {"continue_final_message": True}):
        wanted = full.apply_chat_template(said, tokenize=False, return_dict=False, **options)
        assert quick.apply_chat_template(said, tokenize=False, return_dict=False, **options) == wanted


def test_what_a_user_sets_on_the_quick_tokenizer_holds(folder: Path, tmp_path: Path) -> None:
    full = AutoTokenizer.from_pretrained(folder)
    facts = note(full, tmp_path)
    assert facts is not None
    quick = QuickTokenizer(tmp_path, facts, lambda: AutoTokenizer.from_pretrained(folder))
    name = full.convert_ids_to_tokens(3)
    quick.padding_side, quick.pad_token = "left", name
    full.padding_side, full.pad_token = "left", name
    texts = ["One", "One two three four"]
    assert quick(texts, padding=True)["input_ids"] == full(texts, padding=True)["input_ids"]
    quick.chat_template = full.chat_template = "{{ messages[0]['content'] }}!"
    said = [{"role": "user", "content": "Hi"}]
    assert quick.apply_chat_template(said, tokenize=False, return_dict=False) == "Hi!"


def test_a_template_that_the_quick_one_renders_otherwise_is_left_to_the_full_one(folder: Path, tmp_path: Path) -> None:
    full: Any = AutoTokenizer.from_pretrained(folder)
    full.chat_template = "{% generation %}{{ messages[0]['content'] }}{% endgeneration %}"
    facts = note(full, tmp_path)
    assert facts is not None and facts["foreign_template"]
    quick = QuickTokenizer(tmp_path, facts, lambda: full)
    ids = quick.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=True, return_dict=False)
    assert ids == full.encode("ab", add_special_tokens=False)


def test_importing_the_package_needs_no_torch() -> None:
    said = subprocess.run(
        [sys.executable, "-c", "import sys, outrider; print('torch' in sys.modules)"], capture_output=True, text=True
    )
    assert said.stdout.strip() == "False" and outrider.__version__
