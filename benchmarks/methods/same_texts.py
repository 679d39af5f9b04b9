"""Whether texts are the same whoever drafts them and however many run together: every method against plain decoding.

The reference is plain decoding of one sequence at a time. Every other run says how many of its texts are the same to
the last token, and where the first of the others parts. Sampled texts use the invariant rule, under which a seed says
the text. Requests are also stopped half way and taken up again from their tokens, in the company of others. By default
the small model widened in memory; `--kind` for a small model of random weights of another architecture.
Run: python benchmarks/methods/same_texts.py --device cuda --dtype bfloat16 [--shape 8b] [--limit N] [--bits any]
     [--sequences 1,4,16,64] [--methods mix,suffix,draft-model] [--temperature 0,1] [--kind Qwen3] [--json FILE]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.common import arguments, run
from outrider import methods
from outrider.api import Outrider
from outrider.bench.compare import per_group
from outrider.bench.contenders import run_engine
from outrider.bench.inflate import inflate, inflate_drafter, parse_shape
from outrider.cli.options import parse_options
from outrider.core.params import SamplingParams
from outrider.core.protocols import Recipe
from outrider.models import load_model
from outrider.models.drafts import shipped_draft
from outrider.models.trained import load_eagle3
from outrider.store.prompts import built_in_prompts, read_prompts

SMALL = "own"
SIZES = {
    "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip
WINDOW = 128  # of a Mistral


def main() -> None:
    parser = arguments(__doc__, max_new_tokens=128)
    parser.add_argument("--shape", default="8b", help=f"a name, or {SMALL}: not widened")
    parser.add_argument("--kind", help="of a model of random weights instead: Llama, Qwen2, Qwen3, Mistral")
    parser.add_argument("--methods", default="mix,eagle3,suffix,draft-model")
    parser.add_argument("--set", action="append", default=[], metavar="METHOD.OPTION=VALUE")
    parser.add_argument("--sequences", default="1,4,16,64")
    parser.add_argument("--temperature", default="0,1")
    parser.add_argument("--bits", choices=["same", "any"], default="same")
    args = parser.parse_args()
    loaded = load_model(args.model, device=args.device, dtype=args.dtype)
    shape = None if args.shape == SMALL or args.kind else parse_shape(args.shape, loaded.model.config)
    model = made(args.kind, loaded.model) if args.kind else inflate(loaded.model, shape) if shape else loaded.model
    prompts = read_prompts(args.prompts) if args.prompts else built_in_prompts()
    counts = [int(count) for count in args.sequences.split(",")]
    out: dict[str, Any] = {"shape": args.kind or args.shape, "bits": args.bits, "runs": []}
    limits = {"max_slots": max(counts), "max_context": 1024, "bits": args.bits}
    with Outrider(replace(loaded, model=model, origin=None), "plain", None, limits, runtime="graphs") as engine:
        out["same_bits"] = engine.target.traits.same_bits
        print(f"{out['shape']}: rows have the same bits: {out['same_bits']}", flush=True)
        if not args.kind and (folder := shipped_draft(loaded, "eagle3")) is not None:
            net = load_eagle3(Path(folder), loaded)
            engine._parts.drafts[("eagle3", "")] = inflate_drafter(net, replace(shape, layers=1)) if shape else net
        texts = [engine.encode_chat(p.conversation(())) for p in per_group(prompts, args.limit)]
        texts = [text for text in texts if len(text) + args.max_new_tokens < limits["max_context"]]
        options = parse_options(args.set)
        for temperature in map(float, args.temperature.split(",")):
            params = SamplingParams(
                max_new_tokens=args.max_new_tokens, temperature=temperature, seed=1, ignore_eos=True
            )
            plain = invariant(engine, "plain", {})
            want = outputs(engine, plain, texts, params, 1)
            for method in ("plain", *filter(None, args.methods.split(","))):
                try:
                    given = {k.partition(".")[2]: v for k, v in options.items() if k.partition(".")[0] == method}
                    recipe = invariant(engine, method, given)
                    for count in counts[1:] if method == "plain" else counts:
                        out["runs"].append(
                            {"method": method, "temperature": temperature, "sequences": count}
                            | compared(want, outputs(engine, recipe, texts, params, count))
                        )
                        print(told(out["runs"][-1]), flush=True)
                except Exception as error:  # the other methods are worth their run
                    print(f"{method}: {type(error).__name__}: {error}", flush=True)
                if args.json not in (None, "-"):
                    Path(args.json).write_text(json.dumps(out, indent=1) + "\n", encoding="utf-8")
            got = resumed(engine, plain, texts, params, want, max(counts))
            print(told({"method": "resumed", "temperature": temperature, "sequences": max(counts)}
                       | compared([text[len(text) // 2 :] for text in want], got)), flush=True)  # fmt: skip
    if args.json == "-":
        json.dump(out, sys.stdout, indent=1)


def made(kind: str, like: Any) -> Any:
    """A model of random weights with the vocabulary of another, so that its prompts can be read."""
    extra = {"sliding_window": WINDOW} if kind == "Mistral" else {}
    config = getattr(transformers, f"{kind}Config")(**SIZES, **extra, vocab_size=like.config.vocab_size)
    torch.manual_seed(0)
    with torch.device(like.device):
        model = getattr(transformers, f"{kind}ForCausalLM")._from_config(config, dtype=like.dtype)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_(0, 0.1)
    return model.eval().requires_grad_(False)


def invariant(engine: Outrider, method: str, options: dict[str, Any]) -> Recipe:
    """A method under the rule by which a seed says the text."""
    choices = {field.name for field in fields(methods.find(method).options)}
    rule = {"verifier": "invariant"} if "verifier" in choices else {}
    return engine.recipe(method, rule | options)


def outputs(
    engine: Outrider, recipe: Recipe, texts: Sequence[list[int]], params: SamplingParams, count: int
) -> list[list[int]]:
    """`count` texts at a time; each has the seed of its place."""
    found: list[list[int]] = []
    for begin in range(0, len(texts), count):
        done = run_engine(engine, recipe, texts[begin : begin + count], params)
        found += [list(output) for output in done.outputs]
    return found


def resumed(
    engine: Outrider, recipe: Recipe, texts: Sequence[list[int]], params: SamplingParams,
    want: Sequence[list[int]], count: int,
) -> list[list[int]]:  # fmt: skip
    """The second halves of texts whose first halves are prompts now."""
    halves = [len(text) // 2 for text in want]
    longer = [[*text, *said[:half]] for text, said, half in zip(texts, want, halves, strict=True)]
    return outputs(engine, recipe, longer, params.with_(max_new_tokens=params.max_new_tokens // 2), count)


def compared(want: Sequence[list[int]], got: Sequence[list[int]]) -> dict[str, Any]:
    parted = [next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
              for a, b in zip(want, got, strict=True)]  # fmt: skip
    places = [at for at in parted if at is not None]
    return {"texts": len(want), "same": len(want) - len(places), "first": min(places, default=None)}


def told(one: dict[str, Any]) -> str:
    parts = f", the first parts at token {one['first']}" if one["first"] is not None else ""
    return (
        f"{one['method']:<12} temperature {one['temperature']:g} {one['sequences']:3} sequences: "
        f"{one['same']} of {one['texts']} texts the same{parts}"
    )


if __name__ == "__main__":
    run(main)
