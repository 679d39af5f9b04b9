"""A transformers model made faster: `model.generate` keeps its arguments and its answer, and takes fewer passes.

Run: python examples/faster_transformers.py [model folder or hub id]
"""

from __future__ import annotations

import sys
import time
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer

import outrider
from outrider.models.load import local_path

TEXT = "def area(width, height):\n    return width * height\n\n\ndef volume(width, height, depth):\n    return"


def main(source: str = "smollm2") -> None:
    name = local_path(source)  # the folder of the embedded model; other names stay as they are
    tokenizer, model = AutoTokenizer.from_pretrained(name), AutoModelForCausalLM.from_pretrained(name)
    inputs = tokenizer(TEXT, return_tensors="pt")

    def timed(**how: Any) -> Any:
        model.generate(**inputs, max_new_tokens=2, do_sample=False, **how)  # the first call gets ready
        began = time.perf_counter()
        ids = model.generate(**inputs, max_new_tokens=64, do_sample=False, **how)
        print(f"{time.perf_counter() - began:5.1f} s  {'with outrider' if how else 'transformers alone'}")
        return ids

    alone, faster = timed(), timed(custom_generate=outrider.generate)
    print(f"the same tokens: {alone.equal(faster)}\n\n{tokenizer.decode(faster[0], skip_special_tokens=True)}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
