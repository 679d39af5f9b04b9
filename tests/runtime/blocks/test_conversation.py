"""A conversation on the embedded model: the next answer does not run the past again, and says the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from outrider.api import Outrider
from outrider.core.params import SamplingParams
from outrider.core.schedule import Terms
from outrider.core.schedule.roster import SEEN


@pytest.fixture(scope="module")
def engine(smollm2: Any) -> Iterator[Outrider]:
    with Outrider(smollm2, strict=True, limits={"max_context": 512}, runtime="native", precision="int8") as made:
        yield made


@pytest.mark.parametrize("method", ["plain", "mix"])
def test_the_next_answer_of_a_conversation_finds_its_past_and_is_the_one_without(engine: Outrider, method: str) -> None:
    said = [{"role": "user", "content": f"Name three rivers, please. ({method})"}]
    first = engine.chat(said, method=method, max_new_tokens=12)
    past = engine.encode_chat(said)
    said += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "And three seas?"}]
    second = engine.chat(said, method=method, max_new_tokens=12)
    prompt, params = engine.encode_chat(said), SamplingParams(max_new_tokens=12)
    seen = SEEN if method == "mix" else 0  # it has drafters that follow the target's hidden states
    assert second.stats.cached_tokens >= min(len(past), len(prompt) - 1 - seen) > 20
    assert second.stats.cached_tokens <= len(prompt) - 1 - seen
    alone = engine.engine.submit(prompt, params, engine.recipe(method), terms=Terms(cache_salt=method)).result()
    assert alone.stats.cached_tokens == 0 and list(alone.token_ids) == list(second.token_ids)
