"""The pages that are tested: those of docs/, the ones beside it, and what is written beside programs."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(
    [*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *ROOT.glob("examples/**/*.md"), *ROOT.glob("benchmarks/**/*.md")]
)
FENCE = re.compile(r"^```.*?^```", re.M | re.S)


def place(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()
