"""Building: what is read and what is left out, shards and their memory, going on after a kill, adding and joining."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as Decoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from outrider.core.errors import InputError
from outrider.store import build as module
from outrider.store.build import build, merge
from outrider.store.corpus import pieces, scan
from outrider.store.format import MANIFEST, read_manifest, separator
from outrider.store.store import open_store
from outrider.store.tokens import encoder, fingerprint


def byte_tokenizer(shift: int = 0) -> PreTrainedTokenizerFast:
    """One token a byte; `shift` gives the bytes other ids."""
    letters = sorted(ByteLevel.alphabet())
    vocabulary = {letter: (i + shift) % 256 for i, letter in enumerate(letters)}
    made = Tokenizer(BPE(vocabulary, []))
    made.pre_tokenizer, made.decoder = ByteLevel(add_prefix_space=False), Decoder()
    return PreTrainedTokenizerFast(tokenizer_object=made)


TOKENIZER = byte_tokenizer()


def written(folder: Path, **files: str | bytes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        path = folder / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def made(corpus: Path, out: Path, **options: Any):
    return build(corpus, TOKENIZER, "bytes", out, **options)


def texts(out: Path) -> list[str]:
    """Every document of a store, in order."""
    found: list[list[int]] = [[]]
    for shard in open_store(out).shards:
        for token in shard.tokens.tolist():
            if token == separator(2):
                found.append([])
            else:
                found[-1].append(token)
    return [TOKENIZER.decode(ids) for ids in found[:-1]]


def ids(text: str) -> np.ndarray:
    return np.array(encoder(TOKENIZER)([text])[0], dtype=np.int64)


def test_text_code_and_lines_of_json_become_documents(tmp_path: Path) -> None:
    lines = "\n".join([json.dumps({"text": "grün"}), "", json.dumps({"text": "blau", "id": 1}), "no json", '{"x": 1}'])
    corpus = written(
        tmp_path / "c", a_txt="ein Text\r\n", b_py="x = 1\n", c_jsonl=lines, d__e_md="\ufefftief", f_txt=""
    )
    got = made(corpus, tmp_path / "s")
    assert texts(tmp_path / "s") == ["ein Text\r\n", "x = 1\n", "grün", "blau", "tief"]
    assert (got.documents, got.skipped_lines) == (5, 2)
    assert open_store(tmp_path / "s").count(ids("lau")) == 1


def test_what_is_not_text_is_left_out_counted_and_said(tmp_path: Path, caplog) -> None:
    latin = "größer".encode("latin-1")
    corpus = written(tmp_path / "c", a_txt="good", b_txt=latin, c_bin=b"a\0b", d_txt="cut: é".encode()[:-1])
    written(tmp_path / "c", _hidden="no", _git__config="no")
    (corpus / "link.txt").symlink_to(corpus / "a.txt")
    with caplog.at_level(logging.WARNING, "outrider"):
        got = made(corpus, tmp_path / "s")
    assert texts(tmp_path / "s") == ["good"] and got.skipped_files == 3
    assert "3 files are not UTF-8 text" in caplog.text


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "there is no text in it"),
        ({"a_txt": ""}, "there is no text in it"),
        ({"a_txt": b"\xff\xfe", "b_png": b"\x89PNG\0"}, "its 2 files are not UTF-8 text"),
        ({"a_jsonl": '{"content": "x"}\n'}, "check --field"),
    ],
)
def test_a_corpus_without_text_is_refused_and_leaves_nothing_behind(tmp_path: Path, files, message) -> None:
    corpus = written(tmp_path / "c", **files)
    with pytest.raises(InputError, match=message):
        made(corpus, tmp_path / "s")
    assert not (tmp_path / "s").exists()


def test_bad_arguments_are_refused(tmp_path: Path) -> None:
    corpus = written(tmp_path / "c", a_txt="text")
    with pytest.raises(InputError, match="does not exist"):
        made(tmp_path / "nothing", tmp_path / "s")
    for size in (100, 1 << 31):
        with pytest.raises(InputError, match="--shard-bytes"):
            made(corpus, tmp_path / "s", shard_bytes=size)
    with pytest.raises(InputError, match="is no store"):
        made(corpus, corpus)
    assert not (tmp_path / "s").exists()


def test_another_tokenizer_is_refused_by_builder_and_reader(tmp_path: Path) -> None:
    corpus = written(tmp_path / "c", a_txt="text")
    made(corpus, tmp_path / "s")
    other = byte_tokenizer(shift=1)
    assert fingerprint(other) != fingerprint(TOKENIZER) == fingerprint(byte_tokenizer())
    with pytest.raises(InputError, match="was built with the tokenizer of 'bytes'"):
        build(corpus, other, "other", tmp_path / "s")
    with pytest.raises(InputError, match="not with that of 'other'"):
        open_store(tmp_path / "s", fingerprint(other), "'other'")


def test_pieces_join_to_the_file_wherever_reading_starts_again(tmp_path: Path) -> None:
    text = "".join(f"line {i} ü東🙂\n" * (i % 3) + "é" * i for i in range(60))
    corpus = scan(written(tmp_path / "c", a_txt=text))
    for size in (7, 16, 50, 10_000):
        got = list(pieces(corpus, 0, 0, size, "text"))
        assert "".join(p.text for p in got) == text
        assert [p.ends for p in got] == [False] * (len(got) - 1) + [True]
        half = got[len(got) // 2]
        rest = list(pieces(corpus, 0, half.after, size, "text"))
        assert half.text + "".join(p.text for p in rest) == "".join(p.text for p in got[len(got) // 2 :])


def words(count: int, seed: int = 0) -> str:
    rng = np.random.default_rng(seed)
    return " ".join(rng.choice(["alpha", "beta", "gamma", "delta", "epsilon"], count))


def test_many_shards_answer_as_one(tmp_path: Path) -> None:
    corpus = written(tmp_path / "c", a_txt=words(3000), b_txt=words(50, 1), c_jsonl=json.dumps({"text": words(99, 2)}))
    made(corpus, tmp_path / "one")
    made(corpus, tmp_path / "many", shard_bytes=4096)
    one, many = open_store(tmp_path / "one"), open_store(tmp_path / "many")
    assert len(one.shards) == 1 and len(many.shards) > 8
    assert all(shard.tokens.nbytes <= 4096 for shard in many.shards)
    assert "".join(texts(tmp_path / "one")) == "".join(texts(tmp_path / "many"))
    cuts = len(many.shards) * len("alpha beta")  # a match across two shards is lost, nothing else
    assert one.count(ids("alpha beta")) - cuts <= many.count(ids("alpha beta")) <= one.count(ids("alpha beta"))


def test_joined_shards_hold_the_same_documents_and_old_files_go(tmp_path: Path) -> None:
    corpus, out = written(tmp_path / "c", a_txt=words(900), b_txt=words(900, 1)), tmp_path / "s"
    made(corpus, out, shard_bytes=4096)
    before, reader = texts(out), open_store(out)
    assert len(reader.shards) > 4
    assert merge(out, 1 << 13) < len(reader.shards)
    assert all(shard.tokens.nbytes <= 1 << 13 for shard in open_store(out).shards)
    assert merge(out) == 1
    assert texts(out) == before
    assert sorted(p.name for p in out.iterdir() if p.suffix == ".shard") == read_manifest(out).shards
    assert reader.count(ids("alpha")) == open_store(out).count(ids("alpha"))
    made(corpus, out)  # known already
    assert texts(out) == before


def test_a_second_corpus_is_added_on_request_only(tmp_path: Path) -> None:
    first, second = written(tmp_path / "c", a_txt="first"), written(tmp_path / "d", a_txt="second")
    out = tmp_path / "s"
    made(first, out)
    with pytest.raises(InputError, match="--add"):
        made(second, out)
    assert made(second, out, add=True).shards == 1
    assert texts(out) == ["first", "second"]
    assert made(second, out, add=True).shards == made(first, out).shards == 0
    (second / "b.txt").write_text("more")
    with pytest.raises(InputError, match="has changed since it was indexed"):
        made(second, out, add=True)
    assert texts(out) == ["first", "second"]


def test_a_store_inside_its_corpus_does_not_index_itself(tmp_path: Path) -> None:
    corpus = written(tmp_path / "c", a_txt="text")
    made(corpus, corpus / "store")
    assert made(corpus, corpus / "store").shards == 0
    assert texts(corpus / "store") == ["text"]


def test_only_one_process_builds(tmp_path: Path) -> None:
    from filelock import FileLock

    corpus, out = written(tmp_path / "c", a_txt="text"), tmp_path / "s"
    made(corpus, out)
    with FileLock(out / ".lock"), pytest.raises(InputError, match="another process"):
        made(corpus, out)
    assert made(corpus, out).shards == 0


class Stop(Exception):
    pass


def interrupted(corpus: Path, out: Path, shards: int) -> None:
    def stop(done: int, total: int, doing: str) -> None:
        if doing == f"sorting shard {shards + 1}":
            raise Stop

    with pytest.raises(Stop):
        made(corpus, out, shard_bytes=4096, on_progress=stop)


def same_files(one: Path, other: Path) -> bool:
    names = [sorted(p.name for p in folder.iterdir() if not p.name.startswith(".")) for folder in (one, other)]
    return names[0] == names[1] and all((one / n).read_bytes() == (other / n).read_bytes() for n in names[0])


@pytest.mark.parametrize("shards", [0, 1, 5])
def test_an_interrupted_build_goes_on_and_ends_the_same(tmp_path: Path, shards: int, caplog) -> None:
    lines = "".join(json.dumps({"text": words(40, i)}) + "\nbad\n" for i in range(20))
    corpus = written(tmp_path / "c", a_txt=words(900), b_jsonl=lines, c_txt=words(200, 9))
    out, whole = tmp_path / "s", tmp_path / "whole"
    made(corpus, whole, shard_bytes=4096)
    interrupted(corpus, out, shards)
    assert len(open_store(out).shards) == shards and "not finished" in caplog.text
    with pytest.raises(InputError, match="--shard-bytes 4096"):
        made(corpus, out, shard_bytes=8192)
    with pytest.raises(InputError, match="not finished"):
        made(written(tmp_path / "d", a_txt="text"), out, add=True)
    if shards:
        with pytest.raises(InputError, match="not finished"):
            merge(out)
    finished = [(out / name).stat().st_mtime_ns for name in read_manifest(out).shards]
    got = made(corpus, out, shard_bytes=4096)
    assert got.shards == len(open_store(whole).shards) - shards
    assert [(out / n).stat().st_mtime_ns for n in read_manifest(out).shards[:shards]] == finished
    assert same_files(out, whole)


def test_a_corpus_that_changes_under_an_interrupted_build_is_seen(tmp_path: Path) -> None:
    corpus, out = written(tmp_path / "c", a_txt=words(900)), tmp_path / "s"
    interrupted(corpus, out, 2)
    (corpus / "a.txt").write_text(words(901))
    with pytest.raises(InputError, match="has changed"):
        made(corpus, out, shard_bytes=4096)


KILLED = """
    import sys
    sys.path.insert(0, sys.argv[3])
    from pathlib import Path
    from tests.store.test_build import TOKENIZER, build
    build(Path(sys.argv[1]), TOKENIZER, "bytes", Path(sys.argv[2]), shard_bytes=4096)
"""


def test_a_build_that_is_killed_goes_on_and_ends_the_same(tmp_path: Path) -> None:
    corpus, out, whole = written(tmp_path / "c", a_txt=words(60_000)), tmp_path / "s", tmp_path / "whole"
    made(corpus, whole, shard_bytes=4096)
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(corpus), str(out), str(Path(__file__).parents[2])]
    process = subprocess.Popen(command)
    total = len(read_manifest(whole).shards)
    while process.poll() is None and (not (out / MANIFEST).exists() or len(read_manifest(out).shards) < 3):
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    done = len(open_store(out).shards)
    assert 3 <= done < total
    (out / ".00999.shard.partial").write_bytes(b"left behind")
    (out / f"{done:05d}.shard").write_bytes(b"renamed, not yet in the manifest")
    assert made(corpus, out, shard_bytes=4096).shards == total - done
    assert same_files(out, whole)
    assert not list(out.glob(".*.partial"))


def test_sorting_holds_one_shard_in_memory_whatever_the_corpus(tmp_path: Path, monkeypatch) -> None:
    """The sorter never sees more than a shard, and tokenising never more than a batch and a piece."""
    corpus = written(tmp_path / "c", a_txt=words(9000), b_txt=words(9000, 1))
    sorter, encode = module.sorter(), module.encoder(TOKENIZER)
    sorted_bytes, batches = [], []
    monkeypatch.setattr(module, "sorter", lambda: lambda data: sorted_bytes.append(len(data)) or sorter(data))
    monkeypatch.setattr(module, "encoder", lambda _: lambda t: batches.append(sum(map(len, t))) or encode(t))
    monkeypatch.setattr(module, "BATCH_BYTES", 2000)
    made(corpus, tmp_path / "s", shard_bytes=8192)
    assert len(sorted_bytes) > 10 and max(sorted_bytes) <= 8192
    assert len(batches) > 10 and max(batches) <= 2000 + 8192 // 16


def test_a_line_longer_than_a_shard_is_refused_with_its_file(tmp_path: Path) -> None:
    corpus = written(tmp_path / "c", a_jsonl=json.dumps({"text": words(900)}))
    with pytest.raises(InputError, match="a.jsonl: has a document of"):
        made(corpus, tmp_path / "s", shard_bytes=4096)
