"""A peer lives in a process of its own: what it answers is counted by our rule, and how it dies is told."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from outrider.bench.compare import Unsupported
from outrider.bench.peer import WORKER, PeerError, PeerProcess, PeerRunner, asked, trim
from outrider.core.params import SamplingParams

PARAMS = SamplingParams(max_new_tokens=6, seed=1)
ADAPTER = """
import os
import statistics
import time
from io import UnsupportedOperation

print("noise of a library")


def load(mode, settings):
    assert hasattr(statistics, "median"), "the folder of adapters hides a package"
    if mode == "broken":
        raise RuntimeError("no such weights")
    return Peer(mode)


class Peer:
    facts = {"version": "1"}

    def __init__(self, mode):
        self.mode = mode

    def generate(self, prompts, params):
        os.write(1, b"more noise\\n")
        if self.mode == "dies":
            os.write(2, b"last words\\n")
            os._exit(7)
        if self.mode == "hangs":
            time.sleep(60)
        if len(prompts) > 1:
            raise UnsupportedOperation("one prompt at a time")
        return {"outputs": [[5, 6, 2, 9, 9, 9, 9, 9]], "first_s": 1.0, "total_s": 3.0, "early": 1, "steps": 4}
"""


@pytest.fixture
def worker(tmp_path: Path) -> Path:
    """A folder with an adapter that is named after a package it needs."""
    (tmp_path / "statistics.py").write_text(ADAPTER)
    return Path(shutil.copy(WORKER, tmp_path / "worker.py"))


@pytest.fixture
def process(worker: Path) -> PeerProcess:
    made = PeerProcess(Path(sys.executable), "statistics", worker, timeout_s=30.0)
    yield made  # type: ignore[misc]
    made.close()


def test_an_answer_is_trimmed_and_counted_by_our_rule(process: PeerProcess) -> None:
    """Eight tokens came; end-of-text is the third, one was there with the prefill: two were decoded in two seconds."""
    assert process.load("plain", {}) == {"version": "1"}
    run = PeerRunner(process, "peer", "plain", (2,), plain=True)([[1, 1]], PARAMS)
    assert run.outputs == ((5, 6, 2),) and run.stats.new_tokens == 3 and run.decoded == 2
    assert run.stats.decode_s == 2.0 and run.stats.first_token_s == 1.0 and run.total_s == 3.0
    assert run.stats.steps == 4 and run.split is False and run.comparable and run.peak_bytes


@pytest.mark.parametrize(
    ("tokens", "changes", "kept"),
    [
        ([1, 2, 3], {}, (1, 2)),  # the end-of-text token itself is part of the answer
        ([1, 3, 4, 5, 6, 7, 8, 2], {}, (1, 3, 4, 5, 6, 7)),  # the limit
        ([1, 2, 3], {"ignore_eos": True}, (1, 2, 3)),
        ([2], {}, (2,)),
        ([], {}, ()),
    ],
)
def test_trimming(tokens: list[int], changes: dict[str, bool], kept: tuple[int, ...]) -> None:
    assert trim(tokens, PARAMS.with_(**changes), (2,)) == kept


def test_a_dead_peer_is_told_with_its_last_words(process: PeerProcess) -> None:
    process.load("dies", {})
    with pytest.raises(PeerError, match="status 7.*last words"):
        process.generate("dies", [[1]], asked(PARAMS, (2,)))
    assert not process.alive
    with pytest.raises(PeerError):
        process.load("plain", {})


def test_a_peer_that_hangs_is_ended(worker: Path) -> None:
    process = PeerProcess(Path(sys.executable), "statistics", worker, timeout_s=30.0)
    process.load("hangs", {})
    process.timeout_s = 0.2
    with pytest.raises(PeerError, match="no answer"):
        process.generate("hangs", [[1]], asked(PARAMS, (2,)))
    assert not process.alive


def test_an_error_leaves_the_process_running(process: PeerProcess) -> None:
    with pytest.raises(PeerError, match="RuntimeError: no such weights"):
        process.load("broken", {})
    assert process.load("plain", {}) == {"version": "1"}


def test_what_it_cannot_do_is_not_an_error(process: PeerProcess) -> None:
    process.load("plain", {})
    with pytest.raises(Unsupported, match="one prompt at a time"):
        process.generate("plain", [[1], [1]], asked(PARAMS, (2,)))


def test_parameters_that_peers_might_read_otherwise_are_refused() -> None:
    assert asked(PARAMS, (2,))["eos_ids"] == [2]
    with pytest.raises(Unsupported, match="repetition_penalty"):
        asked(PARAMS.with_(repetition_penalty=1.2), (2,))


def test_transformers_in_a_process_of_its_own_says_what_plain_decoding_says(model_folder: Path) -> None:
    """Its forwards are counted: greedy takes one a token, the prefill among them."""
    import outrider

    prompt = list(range(5, 25)) * 2
    with outrider.load(str(model_folder), method="plain", device="cpu", max_slots=1) as engine:
        want = engine.generate([prompt], max_new_tokens=12, ignore_eos=True)[0].token_ids
    process = PeerProcess(Path(sys.executable), "transformers")
    settings = {"model": str(model_folder), "device": "cpu", "dtype": "float32", "threads": 1, "draft": None}
    params = SamplingParams(max_new_tokens=12, ignore_eos=True, seed=0)
    try:
        for mode in ("plain", "prompt-lookup"):
            process.load(mode, settings)
            run = PeerRunner(process, mode, mode, (2,), plain=mode == "plain")([prompt], params)
            assert run.outputs == (tuple(want),), mode
            assert run.stats.steps == 12 if mode == "plain" else run.stats.steps <= 12
            assert 0 < run.decoded < 12 and run.stats.decode_s > 0
    finally:
        process.close()
