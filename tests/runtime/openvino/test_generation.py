"""Whole texts on the OpenVINO runtime: those of plain decoding, whatever drafts."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import LlamaForCausalLM

pytest.importorskip("openvino", reason="the extra outrider[openvino] is not installed")

from outrider import methods
from outrider.api import Outrider
from outrider.models.load import LoadedModel, fingerprint
from tests.runtime.openvino.test_backend import HAVE_NNCF, PROMPT, cache_home, model

__all__ = ["cache_home", "model"]  # fixtures

METHODS = ("prompt-lookup", "draft-model", "eagle", "ngram-cache", "recycling", "mix")


def engine(model: Any, method: str = "plain", **more: Any) -> Outrider:
    loaded = LoadedModel(model, None, "tiny", frozenset(), fingerprint(model))
    return Outrider(loaded, method, limits={"max_slots": 3, "max_context": 160}, strict=True, **more)


@pytest.mark.parametrize("precision", ["float32", *(["int8"] if HAVE_NNCF else [])])
def test_greedy_output_is_that_of_plain_decoding(model: LlamaForCausalLM, precision: str) -> None:
    with engine(model, runtime="openvino", precision=precision) as made:
        prompts = [PROMPT * 3, [5, 4, 3, 5, 4, 3, 5], list(range(40))]
        plain = [made.generate([p], max_new_tokens=40)[0].token_ids for p in prompts]
        known = {info.name for info in methods.table()}
        tried = [name for name in METHODS if name in known]
        assert len(tried) >= 3
        for name in tried:
            got = [g.token_ids for g in made.generate(prompts, method=name, max_new_tokens=40)]
            assert got == plain, name
