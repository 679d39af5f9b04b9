"""The bench on systems with planted timings: figures as planted, nothing measured twice, nobody silently dropped."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from outrider.bench.compare import Plan, Unsupported, compare
from outrider.bench.contenders import Contender
from outrider.bench.figures import median_round, result
from outrider.bench.journal import FILE, Journal
from outrider.bench.runner import Bench, read, results, run
from outrider.bench.suites import Suite
from outrider.core.errors import InputError
from outrider.core.params import SamplingParams
from outrider.store.prompts import Prompt
from tests.bench.fakes import PREFILL_S, system
from tests.bench.stage import Stage

PROMPTS = [Prompt(f"{group}-{i}", ("ab" * (i + 1),), category=group) for group in ("qa", "rag") for i in range(3)]
SUITE = Suite("toy", PROMPTS)
TEN = SamplingParams(max_new_tokens=10, seed=0)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither bandwidth nor steps nor idle time: nothing here is timed."""
    monkeypatch.setattr("outrider.bench.runner.bandwidth", lambda device: 1e9)
    monkeypatch.setattr("outrider.bench.runner.measured_steps", lambda *a, **k: {"steps": []})
    monkeypatch.setattr("outrider.bench.runner.SETTLE_S", 0.0)


def bench(**changes: Any) -> Bench:
    return Bench(**{"suites": [SUITE], "params": TEN} | changes)


def measured(systems: list[Contender], journal: Journal | None = None, **changes: Any) -> dict[str, Any]:
    journal = journal or Journal()
    run(Stage(), bench(**changes), systems, journal)  # type: ignore[arg-type]
    return results(journal)


def test_a_planted_double_speed_comes_out_as_two_with_its_interval() -> None:
    systems = [system("plain", 1.0), system("fast", 0.5, accepted=2.5)]
    (section,) = measured(systems)["sections"]
    plain, fast = section["methods"]
    for figures in (fast, *fast["groups"].values()):
        assert figures["speedup"] == pytest.approx(2.0)
        assert figures["speedup_interval"] == pytest.approx([2.0, 2.0])
        assert figures["tokens_per_s"] == pytest.approx(2.0)
        assert figures["mean_accepted"] == pytest.approx(2.5) and figures["efficiency"] == pytest.approx(0.8)
        assert figures["ttft_ms"] == pytest.approx(1e3 * PREFILL_S)
    assert plain["speedup"] == 1.0 and section["complete"] and fast["answers"] == 3 * len(PROMPTS)


def test_a_spread_over_prompts_shows_in_the_interval() -> None:
    """Half of the prompts run at 4x, half at 1x: equal tokens, so 10 + 2.5 seconds against 20."""
    uneven = system("uneven", lambda prompts: 0.25 if len(prompts[0]) % 4 == 1 else 1.0)
    (section,) = measured([system("plain", 1.0), uneven])["sections"]
    figures = section["methods"][1]
    low, high = figures["speedup_interval"]
    quick = sum(len(unit["ids"]) for unit in section["units"] if unit["prompt_tokens"][0] % 4 == 1) / 3
    assert figures["speedup"] == pytest.approx(6 / (0.25 * quick + (6 - quick)))
    assert 1.0 <= low < figures["speedup"] < high <= 4.0


def test_one_slow_round_of_three_does_not_count() -> None:
    calls: Counter[str] = Counter()

    def pace(prompts: Any) -> float:
        calls["fast"] += 1
        return 50.0 if 1 < calls["fast"] <= 1 + len(PROMPTS) else 0.5  # after the warm-up: all of the first round

    (section,) = measured([system("plain", 1.0), system("fast", pace)])["sections"]
    assert section["methods"][1]["speedup"] == pytest.approx(2.0)


def test_the_median_of_two_rounds_is_their_mean(stage: Stage) -> None:
    made = compare(stage, PROMPTS[:1], [system("plain", 1.0)], Plan(TEN, rounds=2))  # type: ignore[arg-type]
    runs = [unit.runs["plain"] for unit in made.units]
    assert median_round(runs) == (10.0, 10.0) and median_round(runs[:1]) == (10.0, 10.0)


def test_speed_is_held_against_plain_of_the_same_runtime_and_against_the_best_peer() -> None:
    systems = [
        system("plain", 1.0), system("fast", 0.5),
        system("other", 0.8, runtime="other", baseline="other"),
        system("other:lookup", 0.4, runtime="other", baseline="other"),
    ]  # fmt: skip
    (section,) = measured(systems)["sections"]
    by_label = {row["method"]: row for row in section["methods"]}
    assert section["best_peer"] == "other:lookup"
    assert by_label["other:lookup"]["speedup"] == pytest.approx(2.0)
    assert by_label["fast"]["speedup"] == pytest.approx(2.0)
    assert by_label["fast"]["speedup_over_best_peer"] == pytest.approx(0.8)
    assert by_label["plain"]["speedup_over_best_peer"] == pytest.approx(0.4)


def test_the_share_of_the_floor_is_of_decode_time() -> None:
    """1 GB of weights at 1 GB/s is a second a step; a step takes two."""
    systems = [system("plain", 2.0, weight_bytes=10**9), system("b", 2.0, weight_bytes=10**9, cache_bytes_per_token=0)]
    (section,) = measured(systems)["sections"]
    assert [row["floor_share"] for row in section["methods"]] == pytest.approx([0.5, 0.5])
    assert section["bandwidth"] == 1e9


def test_every_system_answers_a_prompt_before_the_next_in_an_order_that_changes() -> None:
    said: list[str] = []
    labels = ["plain", "b", "c"]
    (section,) = measured([system(label, 1.0, on_run=said.append) for label in labels])["sections"]
    units = [said[i : i + 3] for i in range(3, len(said), 3)]  # behind the warm-up
    assert len(units) == 3 * len(PROMPTS) and all(sorted(unit) == sorted(labels) for unit in units)
    assert len({tuple(unit) for unit in units}) > 3
    for place in range(3):
        assert set(Counter(unit[place] for unit in units).values()) == {len(PROMPTS)}
    rounds = [[u["ids"][0] for u in section["units"] if u["round"] == r] for r in range(3)]
    assert len({tuple(r) for r in rounds}) == 3 and all(sorted(r) == sorted(p.id for p in PROMPTS) for r in rounds)


def test_traffic_keeps_its_order() -> None:
    (section,) = measured([system("plain", 1.0)], suites=[Suite("traffic", PROMPTS, ordered=True)])["sections"]
    assert [u["ids"][0] for u in section["units"]] == [p.id for p in PROMPTS] * 3


def test_sections_are_suites_times_batches_times_temperatures() -> None:
    out = measured([system("plain", 1.0)], batches=(1, 2), temperatures=(0.0, 1.0))
    assert [s["name"] for s in out["sections"]] == [
        "toy, batch 1, temperature 0", "toy, batch 1, temperature 1",
        "toy, batch 2, temperature 0", "toy, batch 2, temperature 1",
    ]  # fmt: skip
    assert max(len(u["ids"]) for u in out["sections"][2]["units"]) == 2


def test_a_limit_below_the_batch_size_still_fills_the_batch() -> None:
    out = measured([system("plain", 1.0)], batches=(1, 3), limit=1)
    assert [s["settings"]["groups"] for s in out["sections"]] == [{"qa": 1, "rag": 1}, {"qa": 3, "rag": 3}]


class Killed(BaseException):
    """Like a kill: nothing that catches errors catches it."""


@pytest.mark.parametrize("after", [1, 7, 20, 33])
def test_a_killed_run_goes_on_without_repeating_a_finished_row(tmp_path: Path, after: int) -> None:
    """Warm-ups are run again, rows are not; the figures are those of an undisturbed run."""
    done: list[str] = []

    def counting(label: str) -> None:
        done.append(label)
        if len(done) == after:
            raise Killed

    labels = ["plain", "b"]
    with pytest.raises(Killed):
        measured([system(label, 1.0, on_run=counting) for label in labels], Journal(tmp_path))
    with (tmp_path / FILE).open("a") as file:
        file.write('{"kind": "run", "cut sho')  # a kill in the middle of a write
    before = [json.loads(line) for line in (tmp_path / FILE).read_text().splitlines()[:-1]]
    kept = [(line["key"], line["label"]) for line in before if line["kind"] == "run"]
    again: list[str] = []
    out = measured([system(label, 1.0, on_run=again.append) for label in labels], Journal(tmp_path))
    rows = 2 * 3 * len(PROMPTS)
    assert len(again) == rows - len(kept) + 2  # two warm-ups
    written = [(tuple(x["key"]), x["label"]) for x in Journal(tmp_path).of("run")]
    assert len(written) == len(set(written)) == rows
    whole = measured([system(label, 1.0) for label in labels])
    assert out["sections"][0]["methods"] == whole["sections"][0]["methods"] and out["complete"]


def test_a_finished_run_measures_nothing_again_and_reads_the_same(tmp_path: Path) -> None:
    first = measured([system("plain", 1.0), system("b", 0.5)], Journal(tmp_path))

    def never(label: str) -> None:
        raise AssertionError(f"{label} ran again")

    second = measured([system("plain", 1.0, on_run=never), system("b", 0.5, on_run=never)], Journal(tmp_path))
    assert second == first == read(tmp_path)


def test_a_folder_of_another_run_is_refused_and_the_difference_named(tmp_path: Path) -> None:
    measured([system("plain", 1.0)], Journal(tmp_path))
    with pytest.raises(InputError, match="rounds 3, this one has 4"):
        measured([system("plain", 1.0)], Journal(tmp_path), rounds=4)
    with pytest.raises(InputError, match="systems"):
        measured([system("plain", 1.0), system("b", 1.0)], Journal(tmp_path))


def test_an_interrupt_keeps_what_was_measured_and_says_so(tmp_path: Path) -> None:
    ran = itertools.count()

    def pressing(label: str) -> None:
        if next(ran) == 9:
            raise KeyboardInterrupt

    journal = Journal(tmp_path)
    done = run(Stage(), bench(), [system("plain", 1.0), system("b", 0.5, on_run=pressing)], journal)  # type: ignore[arg-type]
    out = results(journal)
    assert done is False and out["complete"] is False
    assert out["sections"][0]["methods"][1]["speedup"] == pytest.approx(2.0)
    assert 0 < len(out["sections"][0]["units"]) < 3 * len(PROMPTS)


def crashing(at: int, error: Exception) -> Contender:
    ran = itertools.count()

    def crash(label: str) -> None:
        if next(ran) >= at:
            raise error

    return system("peer", 0.5, runtime="peer", baseline="peer", on_run=crash)


@pytest.mark.parametrize("at", [0, 4])
def test_a_crashing_peer_is_reported_with_its_error_and_stops_nobody(tmp_path: Path, at: int) -> None:
    systems = [system("plain", 1.0), crashing(at, RuntimeError("segmentation\nfault")), system("fast", 0.5)]
    (section,) = measured(systems, Journal(tmp_path))["sections"]
    by_label = {row["method"]: row for row in section["methods"]}
    assert by_label["fast"]["answers"] == by_label["plain"]["answers"] == 3 * len(PROMPTS)
    assert by_label["fast"]["speedup"] == pytest.approx(2.0)
    failures = section["failures"]
    assert {f["label"] for f in failures} == {"peer"} and failures[0]["error"] == "segmentation fault"
    assert by_label["peer"]["answers"] == max(at - 1, 0)  # without the warm-up
    assert read(tmp_path)["sections"][0]["failures"] == failures


def test_a_peer_that_cannot_begin_again_keeps_its_answers_and_its_error() -> None:
    begun = itertools.count()

    def begin() -> Any:
        if next(begun) > 1:  # the warm-up and the first round
            raise RuntimeError("no memory left")
        return system("peer", 0.5).begin()

    peer = Contender("peer", "peer", begin, runtime="peer", baseline="peer")
    (section,) = measured([system("plain", 1.0), peer, system("fast", 0.5)])["sections"]
    by_label = {row["method"]: row for row in section["methods"]}
    assert by_label["peer"]["answers"] == len(PROMPTS) and by_label["fast"]["answers"] == 3 * len(PROMPTS)
    assert {f["error"] for f in section["failures"]} == {"no memory left"} and section["complete"]


def test_a_mended_peer_is_measured_when_the_run_is_called_again(tmp_path: Path) -> None:
    measured([system("plain", 1.0), crashing(4, RuntimeError("no"))], Journal(tmp_path))
    mended = system("peer", 0.5, runtime="peer", baseline="peer")
    (section,) = measured([system("plain", 1.0), mended], Journal(tmp_path))["sections"]
    assert section["failures"] == [] and section["methods"][1]["answers"] == 3 * len(PROMPTS)


def test_what_a_peer_cannot_do_is_no_fault(tmp_path: Path) -> None:
    systems = [system("plain", 1.0), crashing(0, Unsupported("one prompt at a time"))]
    (section,) = measured(systems, Journal(tmp_path))["sections"]
    assert section["failures"][0]["fault"] is False and section["complete"]


def test_the_failure_of_the_baseline_ends_the_run() -> None:
    with pytest.raises(RuntimeError, match="gone"):
        measured([system("plain", 1.0, on_run=lambda _: (_ for _ in ()).throw(RuntimeError("gone")))])


def test_memory_is_reset_at_every_prompt_or_kept_as_asked() -> None:
    class Learning:
        def __init__(self) -> None:
            self.plain, self.forgot = system("b", 1.0).begin(), 0

        def __call__(self, prompts: Any, params: Any) -> Any:
            return self.plain(prompts, params)

        def forget(self) -> None:
            self.forgot += 1

    for memory, expected in (("reset", len(PROMPTS)), ("keep", 0)):
        made: list[Learning] = []

        def begin(made: list[Learning] = made) -> Learning:
            made.append(Learning())
            return made[-1]

        measured([system("plain", 1.0), Contender("b", "b", begin)], memory=memory)
        assert [one.forgot for one in made] == [0, *[expected] * 3]  # warm-up, then afresh in each round


def test_different_answers_are_counted_and_the_first_difference_kept() -> None:
    (section,) = measured([system("plain", 1.0), system("liar", 1.0, said=1)])["sections"]
    liar = section["methods"][1]
    assert liar["identical"] is False and liar["different"] == 3 * len(PROMPTS)
    assert liar["first_differences"][0]["position"] == 0 and liar["first_differences"][0]["gap"] is not None


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"rounds": 2}, "3 rounds or more"), ({"batches": (0,)}, "batch size of 0"), ({"limit": 0}, "limit of 0"),
     ({"suites": [SUITE, SUITE]}, "same name"), ({"temperatures": (-1.0,)}, "temperature"),
     ({"suites": []}, "nothing")],
)  # fmt: skip
def test_a_bad_bench_is_refused_with_the_remedy(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        bench(**changes)


def test_compare_and_bench_give_the_same_figures(stage: Stage) -> None:
    systems = [system("plain", 1.0), system("fast", 0.5)]
    alone = result(compare(stage, PROMPTS, systems, Plan(TEN, rounds=3)))  # type: ignore[arg-type]
    (section,) = measured(systems)["sections"]
    assert set(alone) <= set(section)
    for a, b in zip(alone["methods"], section["methods"], strict=True):
        assert {k: a[k] for k in ("speedup", "tokens_per_s", "mean_accepted", "ttft_ms")} == {
            k: pytest.approx(b[k]) for k in ("speedup", "tokens_per_s", "mean_accepted", "ttft_ms")
        }
