"""Writes docs/methods/ from the registry: what every method is, what it needs, its options and how it is proved.

python docs/scripts/methods.py            # writes the pages; a test fails where they are not what this writes
"""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from outrider.methods import registry
from outrider.methods.registry import MethodInfo, Option

FOLDER = Path(__file__).resolve().parents[1] / "methods"
PACKAGE = Path(registry.__file__).parents[1]
WIDTH = 118
SHARED = 3  # an option that so many methods of a page have alike is explained once, above them


@dataclass(frozen=True)
class Page:
    file: str
    title: str
    text: str
    families: tuple[str, ...] = ()
    names: tuple[str, ...] = ()  # of methods that stand here whatever their family


PAGES = (
    Page(
        "default.md",
        "The default, and two yardsticks",
        "`mix` is what runs unless another method is named. How it decides is told in "
        "[the default method](../guides/drafting/default.md).",
        ("mixture", "baseline", "yardstick"),
    ),
    Page(
        "copies.md",
        "Copies: drafting from text",
        "These find text that went on once as it may go on now: in the prompt, in finished requests, in a corpus, in a "
        "text that you expect. They need no second model, and a proposal costs microseconds.",
        ("retrieval",),
    ),
    Page(
        "tables.md",
        "Tables: drafting from what the model said",
        "These keep tables of n-grams or of the target's own guesses, and learn while they run. They need no second "
        "model.",
        ("table", "fixed point"),
    ),
    Page(
        "draft-models.md",
        "Draft models",
        "A smaller model drafts, of the same family or of another vocabulary "
        "([through text](../guides/drafting/cross-vocabulary.md)). The methods differ in the shape of the tree, in how "
        "candidates are drawn, and in the rule that accepts them ([draws](../concepts/draws.md)). Without `draft` it "
        "is the newest draft kept for this target (`outrider train distill`), the one that comes with the package (for "
        "the embedded model five of its layers, distilled), or else the target's first layers and its head. With "
        "`verifier=invariant` a chain is drawn with the target's own noise, so that both agree where their "
        "distributions are close, and the output at equal seeds is the same as without speculation.",
        ("model",),
    ),
    Page(
        "stopping.md",
        "Drafts that know when to stop",
        "Chains of a draft model, or of a trained layer, that end by the drafter's doubt of itself. "
        "[How they decide](../guides/drafting/stopping.md).",
        names=("specdec-plus-plus", "speckv"),
    ),
    Page(
        "early-exit.md",
        "Early exits",
        "The target's own first layers draft: as they are, left where it pays, or with a trained adapter. "
        "[How they work](../guides/drafting/early-exit.md).",
        names=("early-exit", "del", "kangaroo"),
    ),
    Page(
        "trained.md",
        "Trained drafters",
        "A small network reads the target's hidden states and drafts a tree. [Train one](../guides/training/train.md) "
        "or [add a published one](../guides/training/drafters.md). For the embedded model an `eagle3` drafter comes "
        "with the package; the others are refused, with the commands that make one, where none is kept.",
        ("feature", "block"),
    ),
)


def pages() -> dict[str, str]:
    """File names in docs/methods/ and what belongs into them."""
    by_family = {family: page for page in PAGES for family in page.families}
    by_name = {name: page for page in PAGES for name in page.names}
    of_page: dict[str, list[MethodInfo]] = {page.file: [] for page in PAGES}
    for info in sorted(registry.table(), key=lambda one: one.name != registry.DEFAULT):
        if not (PACKAGE / info.file).is_file():
            continue  # of another package
        page = by_name.get(info.name) or by_family.get(info.family)
        if page is None:
            raise SystemExit(f"{info.name}: give its family, {info.family!r}, a page in {Path(__file__).name}")
        of_page[page.file].append(info)
    made = {page.file: method_page(page, of_page[page.file]) for page in PAGES}
    return {"index.md": index(of_page), **made}


def index(of_page: dict[str, list[MethodInfo]]) -> str:
    text = [
        "# All methods",
        "",
        wrapped(
            "A method is a recipe: a drafter, the shape of its tree, an acceptance rule, and a policy of how much to "
            "speculate. All of these are lossless. [Which one is for you](../start/which-method.md) is a shorter page."
        ),
        "",
        wrapped(
            "Options are set with `-o name=value` or `outrider.load(..., options={...})`, and each request may name "
            "its own method. What cannot be, a value out of its range or a folder that holds no drafter, is refused "
            "before the model is loaded."
        ),
        "",
        "```",
        "outrider methods                                 # this list, with options",
        'outrider generate "hi" --method suffix -o budget=8',
        "outrider methods --json                          # every option with its default and meaning",
        "outrider check --method suffix --quick           # proves that its output is the model's",
        "```",
        "",
    ]
    for page in PAGES:
        text += [f"## {page.title}", ""]
        text += [item(f"[`{info.name}`]({page.file}#{info.name}): {info.summary}") for info in of_page[page.file]]
        text.append("")
    return "\n".join(text)


def method_page(page: Page, methods: list[MethodInfo]) -> str:
    counts = Counter(key(option) for info in methods for option in info.option_list)
    most = {k[0]: k for k, count in reversed(counts.most_common()) if count >= SHARED}  # of each name the commonest
    alike = {k: option for info in methods for option in info.option_list if (k := key(option)) in most.values()}
    text = [f"# {page.title}", "", wrapped(page.text), ""]
    if alike:
        text += ["## Options that several share", "", *map(described, alike.values()), ""]
    for info in methods:
        text += [f"## {info.name}", "", wrapped(sentence(info.summary)), "", *facts(info), ""]
        own = [option for option in info.option_list if key(option) not in alike]
        shared = [option for option in info.option_list if key(option) in alike]
        if own:
            text += ["Options:", "", *map(described, own), ""]
        if shared:
            listed = ", ".join(f"`{option.name}`" for option in shared)
            text += [wrapped(f"{'And' if own else 'Options'}, as above: {listed}."), ""]
    return "\n".join(text)


def facts(info: MethodInfo) -> list[str]:
    return [
        item(f"Paper: {linked(info.paper)}") if info.paper != "-" else "- Paper: none",
        item(f"Needs: {info.needs}"),
        item(f"File: `outrider/{info.file}`"),
        item(f"Proof: {proof(info)}"),
    ]


def proof(info: MethodInfo) -> str:
    """What `outrider check` shows of a method, by the rule that it has unless told otherwise."""
    if info.name == "plain":
        return "what all others are held against; it is itself held against the unmodified `transformers` model"
    if not info.lossless:
        return "none: its output is not the model's"
    rule = next((str(option.default) for option in info.option_list if option.name == "verifier"), "invariant")
    start = f"`outrider check --method {info.name}`; "
    if rule == "invariant":
        return start + "rule `invariant`: at equal seeds the text is that of plain decoding, token by token"
    shown_by = "every outcome on toy models to 1e-9, greedy texts token by token, sampled texts by a martingale"
    return start + f"rule `{rule}`: {shown_by}"


def described(option: Option) -> str:
    choices = [] if option.name == "verifier" or "|" not in option.type else option.type.split("|")
    words = [word for word in choices if word not in ("int", "float", "str") and word != option.default]
    others = f", or {', '.join(f'`{word}`' for word in words)}" if words else ""
    default = "empty" if option.default == "" else f"`{shown(option.default)}`"
    more = " ([rules](../concepts/draws.md#the-rules))" if option.name == "verifier" else ""
    return item(f"`{option.name}` (default {default}{others}): {option.help}{more}")


def shown(value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1 << 20 and value % (1 << 20) == 0:
        return f"{value} ({value >> 20} MiB)"
    return str(value).lower() if isinstance(value, bool) else str(value)


def key(option: Option) -> tuple[str, str, str, str]:
    return option.name, option.type, str(option.default), option.help


def linked(paper: str) -> str:
    return re.sub(r"arXiv (\d{4}\.\d{5})", r"[arXiv \1](https://arxiv.org/abs/\1)", paper)


def sentence(summary: str) -> str:
    return f"{summary[0].upper()}{summary[1:]}."


def wrapped(text: str) -> str:
    return _fill(text, "")


def item(text: str) -> str:
    return _fill(f"- {text}", "  ")


def _fill(text: str, indent: str) -> str:
    return textwrap.fill(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def write(files: Iterable[tuple[str, str]]) -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, text in files:
        (FOLDER / name).write_text(text, encoding="utf-8")
        print(f"docs/methods/{name}: {len(text.split())} words")


if __name__ == "__main__":
    write(pages().items())
