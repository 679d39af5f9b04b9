"""Room: no arrival, cut, neighbour, found prefix or pre-emption changes a text, and a full cache goes on."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core.errors import CacheFull
from outrider.core.schedule import Handle, StepReport, Terms
from tests.core.schedule.toys import PLAIN, PROMPTS, SAMPLED, Pool, engine, lookup, said

CASES = [(prompt, SAMPLED.with_(temperature=t, seed=seed)) for prompt in PROMPTS for t, seed in ((0.0, 1), (1.0, 2))]
WANT = [said(prompt, params) for prompt, params in CASES]


@settings(max_examples=40, deadline=None)
@given(
    order=st.permutations(range(len(CASES))), waits=st.lists(st.integers(0, 3), min_size=8, max_size=8),
    prompt_rows=st.sampled_from([1, 3, 64]), slots=st.integers(1, 6), pool=st.sampled_from([27, 60, 1000]),
    keeps=st.booleans(), put_back=st.lists(st.integers(0, 40), max_size=6), drafted=st.booleans(),
)  # fmt: skip
def test_a_text_is_the_same_whenever_it_came_and_whatever_ran_beside_it(
    order: list[int], waits: list[int], prompt_rows: int, slots: int, pool: int, keeps: bool, put_back: list[int],
    drafted: bool,
) -> None:  # fmt: skip
    made = engine(Pool(pool, slots, prompt_rows, keeps))
    recipe, handles = lookup() if drafted else PLAIN, dict[int, Handle]()
    for i, wait in zip(order, waits, strict=True):
        terms = Terms(priority=i % 2, caller=str(i % 3))
        handles[i] = made.submit(CASES[i][0], CASES[i][1], recipe, terms=terms)
        for _ in range(wait):
            made.step()
    for step in range(1000):
        if step in put_back and made.running:
            made.roster.put_back(made.running[step % len(made.running)])
        if not made.step():
            break
    assert [handles[i].result().token_ids for i in range(len(CASES))] == WANT
    assert made.target.free_slots == slots and not made.queue
    for handle, want in zip((handles[i] for i in range(len(CASES))), WANT, strict=True):
        stats = handle.result().stats
        assert stats.new_tokens == len(want) and stats.accepted <= stats.drafted


def test_twice_the_cache_in_live_text_makes_progress_without_thrash() -> None:
    target, reports = Pool(120, slots=8, keeps=False), list[StepReport]()
    made = engine(target)
    made.watch(reports.append)
    params = SAMPLED.with_(max_new_tokens=25)
    handles = [made.submit(PROMPTS[3], params, lookup()) for _ in range(8)]  # 8 texts of 31 tokens in room for 120
    assert [h.result().token_ids for h in handles] == [said(PROMPTS[3], params)] * 8
    preempted = sum(h.result().stats.preemptions for h in handles)
    assert 0 < preempted == sum(report.preempted for report in reports) <= 12  # planned: one or two of each text
    assert target.free_slots == 8


def test_what_never_fits_ends_alone_and_names_the_reason() -> None:
    made = engine(Pool(20, slots=2, keeps=False))
    long, short = made.submit([1, 2] * 12, SAMPLED), made.submit([3], SAMPLED)
    assert short.result().token_ids == said([3])
    with pytest.raises(CacheFull, match="do not fit"):
        long.result()


def test_a_found_prefix_is_not_run_again_and_never_found_under_another_salt() -> None:
    target = Pool(prompt_rows=64)
    made = engine(target)
    prompt = PROMPTS[2]
    for salt, again in (("a", False), ("a", True), ("b", False), ("", False), ("b", True)):
        made.submit(prompt, SAMPLED, lookup(), terms=Terms(cache_salt=salt)).result()
        found = target.found[-1]
        assert found == (salt, len(prompt) - 1 if again else 0)
    handle = made.submit(prompt, SAMPLED, lookup(), terms=Terms(cache_salt="a"))
    assert handle.result().token_ids == said(prompt) and handle.result().stats.cached_tokens == len(prompt) - 1


def test_samples_of_one_prompt_share_it_also_when_the_first_is_put_back() -> None:
    params = SAMPLED.with_(n=3)
    want = [g.token_ids for g in engine().submit(PROMPTS[2], params).results()]
    for step in range(6):
        made = engine(Pool(prompt_rows=3, keeps=False))
        handle = made.submit(PROMPTS[2], params)
        for _ in range(step):
            made._take_in()
            made.roster.admit()
            made._run_prompts(3)
        if made.running:
            made.roster.put_back(made.running[0])
        assert [g.token_ids for g in handle.results()] == want
