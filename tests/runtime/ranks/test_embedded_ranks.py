"""The embedded model, whose three key heads three ranks can share."""

from __future__ import annotations

import pytest

import outrider


@pytest.mark.slow
def test_three_ranks_of_the_embedded_model_say_what_one_process_says() -> None:
    """The parts of a sum are added in another order, seven digits down: no choice of these texts is as near as that."""
    found = []
    for more in ({"runtime": "eager"}, {"tensor_parallel": 3}):
        with outrider.load("smollm2", "plain", max_context=256, **more) as engine:
            prompts = ["The capital of France is", "def add(a, b):\n    return", "One, two, three. One, two,"]
            found.append(
                {
                    (method, temperature): [
                        tuple(one.token_ids)
                        for one in engine.generate(
                            prompts, method=method, temperature=temperature, seed=5, max_new_tokens=40
                        )
                    ]
                    for method in ("plain", "suffix", "mix")
                    for temperature in (0.0, 0.8)
                }
            )
    assert found[0] == found[1]
