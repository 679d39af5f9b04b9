"""Speed-up at the cost of a large model with the acceptance of a real one: a small model, widened in memory.

`outrider bench inflate` writes such a model; here it is made on the device and thrown away. Plain decoding and the
methods run in the same runtime; every figure stands beside its accepted length.
Run: python benchmarks/inflated.py --device cuda --prompts FILE.jsonl [--group chat] [--limit N] [--json FILE]
"""

from __future__ import annotations

import sys

from common import arguments, give, measure, run

import outrider
from outrider.bench.compare import per_group
from outrider.bench.contenders import method_contender, parse_specs
from outrider.bench.inflate import difference, inflate, parse_shape
from outrider.cli.options import parse_options
from outrider.models import load_model
from outrider.models.drafts import load_draft
from outrider.prompts import built_in_prompts, read_prompts


def main() -> None:
    parser = arguments(__doc__, max_new_tokens=128)
    parser.add_argument("--shape", default="8b")
    parser.add_argument("--methods", default="mix")
    parser.add_argument("--set", action="append", default=[], metavar="LABEL.OPTION=VALUE")
    parser.add_argument("--group", help="only this group of prompts")
    parser.add_argument("--draft", metavar="FOLDER", help="a draft trained for the small model, as the large one's own")
    parser.add_argument("--runtime", default="auto")
    parser.add_argument("--max-context", type=int, default=2048)
    args = parser.parse_args()
    loaded = load_model(args.model, device=args.device, dtype=args.dtype)
    big = inflate(loaded.model, parse_shape(args.shape, loaded.model.config))
    worst, agree = difference(loaded.model, big)
    told = f"{big.num_parameters() / 1e9:.2f}B parameters; logits differ by {worst:.1e} of the largest"
    print(f"{told}, {100 * agree:.0f}% of rows choose the same token", file=sys.stderr)
    prompts = per_group(read_prompts(args.prompts) if args.prompts else built_in_prompts(), None)
    prompts = per_group([p for p in prompts if args.group in (None, p.group)], args.limit)
    with outrider.load(
        big, method="plain", tokenizer=loaded.tokenizer, runtime=args.runtime, max_slots=1, max_context=args.max_context
    ) as engine:
        if args.draft:
            engine._parts.drafts[("", 0)] = load_draft(args.draft, loaded)
        specs = parse_specs(args.methods, parse_options(args.set))
        out = measure(args, engine, prompts, [method_contender(engine, spec) for spec in specs])
    lines = [
        f"{m['method']}: {m['speedup']:.2f}x plain at accepted length {m['mean_accepted']:.2f}"
        for m in out["methods"]
        if m["method"] != "plain"
    ]
    give(args, {"difference": worst, "same_token": agree, **out}, lines, out)


if __name__ == "__main__":
    run(main)
