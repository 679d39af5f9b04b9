"""Requests of any thread: they share batches, their deliveries join to the text, and one that leaves harms nobody."""

from __future__ import annotations

import queue
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from outrider.check.toy import ToyTarget
from outrider.core.errors import ClosedEngine, FullQueue, InputError, OutriderError
from outrider.core.generation import Delivery, FinishReason
from outrider.core.sampling import SamplingParams
from outrider.core.schedule import StepReport, Terms
from tests.core.schedule.toys import LM, PROMPTS, SAMPLED, engine, letters, lookup, said


def test_calls_of_several_threads_share_the_batches_of_one_engine() -> None:
    made, steps = engine(ToyTarget(LM, slots=4, prompt_rows=64)), []
    made.watch(steps.append)
    barrier = threading.Barrier(4)

    def ask(prompt: list[int]) -> list[int]:
        handle = made.submit(prompt, SAMPLED)
        barrier.wait(10)
        return handle.result().token_ids

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, PROMPTS)) == [said(prompt) for prompt in PROMPTS]
    assert len(steps) == made.steps <= SAMPLED.max_new_tokens + 2  # together, not one after the other


def test_two_threads_submit_and_one_steps() -> None:
    made, stop = engine(ToyTarget(LM, slots=3)), threading.Event()
    worker = threading.Thread(target=made.work, args=(stop,))
    worker.start()
    want = {i: said(PROMPTS[i]) for i in range(4)}

    def client(first: int) -> list[tuple[int, list[int], str]]:
        got = []
        for i in range(12):
            which = (first + i) % 4
            arrived: queue.Queue[Delivery] = queue.Queue()
            made.submit(PROMPTS[which], SAMPLED, lookup() if i % 2 else None, listener=arrived.put)
            deliveries = [arrived.get(timeout=20)]
            while not deliveries[-1].last:
                deliveries.append(arrived.get(timeout=20))
            got.append((which, [t for d in deliveries for t in d.token_ids], "".join(d.text for d in deliveries)))
            end = deliveries[-1].generation
            assert end is not None and end.finish_reason is FinishReason.LENGTH and end.token_ids == got[-1][1]
        return got

    with ThreadPoolExecutor(2) as pool:
        results = [one for many in pool.map(client, range(2)) for one in many]
    stop.set()
    worker.join(20)
    assert not worker.is_alive() and len(results) == 24
    assert all(tokens == want[which] and text == letters(tokens) for which, tokens, text in results)
    assert made.target.free_slots == 3 and not made.running and not made.queue and not made._live


def test_cancelling_from_another_thread_takes_effect_before_the_next_step() -> None:
    made = engine()
    seen: list[Delivery] = []
    handle = made.submit(PROMPTS[0], SAMPLED, listener=seen.append)
    other = made.submit(PROMPTS[1], SAMPLED)
    made.step()
    made.step()
    assert made.cancel(handle.id)
    made.step()
    assert handle.done and handle.partial()[0].token_ids == said(PROMPTS[0])[:2]
    assert seen[-1].generation is not None and seen[-1].generation.finish_reason is FinishReason.CANCELLED
    assert not made.cancel(handle.id)
    assert other.result().token_ids == said(PROMPTS[1])


def test_a_full_queue_has_an_error_of_its_own_and_queues_nothing() -> None:
    made = engine(ToyTarget(LM, slots=1), max_queue=2)
    handles = [made.submit(PROMPTS[1], SAMPLED) for _ in range(2)]
    with pytest.raises(FullQueue, match="2 requests are waiting"):
        made.submit(PROMPTS[1], SAMPLED)
    made.step()  # one of them runs now
    handles.append(made.submit(PROMPTS[1], SAMPLED))
    assert {tuple(h.result().token_ids) for h in handles} == {tuple(said(PROMPTS[1]))}


def test_a_closed_engine_ends_those_who_wait_and_takes_no_more() -> None:
    made = engine()
    worker = threading.Thread(target=made.work, args=(threading.Event(),))
    worker.start()
    handle = made.submit(PROMPTS[0], SamplingParams(max_new_tokens=100))
    made.close()
    worker.join(10)
    assert handle.done and not worker.is_alive()
    with pytest.raises(ClosedEngine):
        made.submit(PROMPTS[0], SAMPLED)


def test_stepping_from_within_a_step_is_refused_and_ends_that_request_alone() -> None:
    made = engine()
    bad = made.submit(PROMPTS[0], SAMPLED, listener=lambda delivery: made.step() and None)
    good = made.submit(PROMPTS[1], SAMPLED)
    assert good.result().token_ids == said(PROMPTS[1])
    with pytest.raises(OutriderError, match="within one of its steps"):
        bad.result()


@pytest.mark.parametrize("whole", [True, False], ids=["generation", "tokens"])
@pytest.mark.parametrize("at", [1, 5, 13])
def test_a_resumed_text_goes_on_as_if_it_had_never_been_interrupted(at: int, whole: bool) -> None:
    params = SamplingParams(max_new_tokens=14, temperature=1.0, seed=3, frequency_penalty=0.7, min_new_tokens=3,
                            stop=("ZZ",), logprobs=1)  # fmt: skip
    before = engine().submit(PROMPTS[1], params, lookup())
    while len(before.partial()[0].token_ids) < at:
        before.engine.step()  # type: ignore[attr-defined]
    part, want = before.partial()[0], before.result()
    seen: list[Delivery] = []
    terms = Terms(resume_from=part if whole else part.token_ids)
    after = engine().submit(PROMPTS[1], params, terms=terms, listener=seen.append).result()
    assert (after.token_ids, after.text, after.finish_reason) == (want.token_ids, want.text, want.finish_reason)
    assert [t for d in seen for t in d.token_ids] == want.token_ids[len(part.token_ids) :]
    assert part.text + "".join(d.text for d in seen) == want.text
    assert after.stats.new_tokens == 14 and len(after.origins) == 14
    if whole:
        assert after.origins[: len(part.origins)] == part.origins and after.logprobs is not None
        assert [one.token for one in after.logprobs] == after.token_ids


def test_what_is_resumed_at_its_end_is_done_and_behind_it_is_refused() -> None:
    tokens = said(PROMPTS[1])
    handle = engine().submit(PROMPTS[1], SAMPLED, terms=Terms(resume_from=tokens))
    assert handle.result().token_ids == tokens and handle.result().finish_reason is FinishReason.LENGTH
    with pytest.raises(InputError, match="resume_from goes on behind the end"):
        engine().submit(PROMPTS[1], SAMPLED, terms=Terms(resume_from=[*tokens, 1]))


def test_a_step_is_reported_to_who_watches_until_it_is_ended() -> None:
    made, reports = engine(), list[StepReport]()
    end = made.watch(reports.append)
    handle = made.submit(PROMPTS[2], SamplingParams(max_new_tokens=12), lookup())
    result = handle.result()
    assert sum(report.emitted for report in reports) == 12 and len(reports) == result.stats.steps == made.steps
    assert sum(report.accepted for report in reports) == result.stats.accepted
    assert [report.number for report in reports] == [*range(1, made.steps + 1)]
    assert reports[-1].running == 0 and all(report.timing.verify >= 0 for report in reports)
    end()
    made.submit(PROMPTS[1], SAMPLED).result()
    assert len(reports) == result.stats.steps
