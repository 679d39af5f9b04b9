"""How fluent the page of a long text is: milliseconds a step while scrubbing, measured in Chromium.

python benchmarks/pages/page.py [--steps 600] [--gain 6] [--width 5] [--json FILE]

A page of a text that no model made: about 2,000 tokens in 600 steps, each with a tree. The scrubber goes through all
steps, back, and in strides. `script` is the page's work with layout; `step` lasts until the frame with the result was
drawn, so it is never less than what is left of a frame. Opening the page is measured, too.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout: the browser's driver is that of the tests

from outrider.core.params import SamplingParams
from outrider.explain import explain
from tests.explain.browser import drive
from tests.explain.made import decode, made, plain_of

MEASURE = """
  const opened = await page.evaluate(() => performance.getEntriesByType("navigation")[0].duration);
  await page.getByRole("tab", { name: "Steps" }).click();
  const steps = await page.evaluate(async () => {
    const range = document.querySelector(".scrubber");
    const drawn = () => new Promise((done) => {
      const channel = new MessageChannel();
      channel.port1.onmessage = done;
      requestAnimationFrame(() => channel.port2.postMessage(0)); // after the frame was laid out and painted
    });
    const out = [];
    const last = Number(range.max);
    for (const stride of [1, -1, 37]) {
      for (let at = stride < 0 ? last : 0; at >= 0 && at <= last; at += stride) {
        const begun = performance.now();
        range.value = at;
        range.dispatchEvent(new Event("input"));
        document.body.getBoundingClientRect(); // lays out
        const script = performance.now() - begun;
        await drawn();
        out.push([script, performance.now() - begun]);
      }
    }
    return out;
  });
  return { opened, steps };
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--gain", type=int, default=6, help="most tokens a step")
    parser.add_argument("--width", type=int, default=5, help="candidates at each depth")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    generation = made(args.steps, args.gain, args.width)
    page = explain([generation, plain_of(generation)], "A long text", SamplingParams(), decode, "made up")
    with tempfile.TemporaryDirectory() as folder:
        file = page.save(Path(folder) / "page.html")
        size = file.stat().st_size
        found = drive(file.as_uri(), MEASURE, timeout=300)
    figures = {
        "tokens": len(generation.token_ids), "steps": args.steps, "candidates": generation.stats.drafted,
        "file_mb": round(size / 1e6, 2), "opened_ms": round(found["opened"]),
    }  # fmt: skip
    for name, values in zip(("script", "step"), zip(*found["steps"], strict=True), strict=True):
        ordered = sorted(values)
        figures |= {
            f"{name}_{share}_ms": round(ordered[int(share / 100 * (len(ordered) - 1))], 1) for share in (50, 99, 100)
        }
    for name, value in figures.items():
        print(f"{name:>16}  {value}")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
