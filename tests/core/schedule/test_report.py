"""The report on a prompt says what the model says of each of its tokens, whatever pieces it runs in."""

from __future__ import annotations

import pytest
import torch

from outrider.api import Outrider
from outrider.models import LoadedModel


@pytest.mark.parametrize("rows", [512, 5])
@pytest.mark.parametrize("method", ["plain", "suffix"])
def test_a_report_is_the_models_log_softmax_at_every_place(tiny_llama: LoadedModel, rows: int, method: str) -> None:
    prompt = [1, 5, 9, 5, 9, 7, 3, 11, 13, 4, 4, 8]
    with torch.inference_mode():
        wanted = torch.log_softmax(tiny_llama.model(torch.tensor([prompt])).logits[0].float(), -1)
    with Outrider(tiny_llama, method, limits={"max_slots": 2}, runtime="eager") as engine:
        object.__setattr__(engine.target.traits, "prompt_rows", rows)
        found = engine.generate([prompt], max_new_tokens=3, prompt_logprobs=2)[0].prompt_logprobs
        again = engine.generate([prompt], max_new_tokens=3, prompt_logprobs=0, n=2)[0].prompt_logprobs
        assert engine.generate([prompt], max_new_tokens=3)[0].prompt_logprobs is None
    assert found is not None and found[0] is None and len(found) == len(prompt) and len(again) == len(prompt)
    for place, one in enumerate(found[1:]):
        assert one.token == prompt[place + 1]
        assert one.raw == pytest.approx(float(wanted[place, one.token]), abs=1e-4)
        assert [token for token, _, _ in one.top] == wanted[place].topk(2).indices.tolist()
    assert [one.raw for one in again[1:]] == pytest.approx([one.raw for one in found[1:]], abs=1e-5)
