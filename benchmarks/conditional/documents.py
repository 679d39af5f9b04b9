"""Hits among the best ten documents: what a model would write to a question (SEAL, untrained), beside BM25.

    python benchmarks/conditional/documents.py QUESTIONS.jsonl --model smollm2

The file is Spec-Bench's: of category rag, each prompt has its passages, a line each, and the question last. All
passages are one corpus. A hit: one of the best ten is a passage of the question's prompt; an answer: one of them holds
a reference.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import outrider
from outrider.search import documents
from outrider.store.build import build
from outrider.store.fm.files import CompactStore, compact, open_compact
from outrider.store.tokens import encoder

TOP = 10
Ranking = Callable[[str], list[int]]


@dataclass(frozen=True)
class Asked:
    question: str
    passages: range  # their numbers
    answers: list[str]


def read(file: Path) -> tuple[list[str], list[Asked]]:
    passages: list[str] = []
    asked = []
    for row in map(json.loads, file.read_text(encoding="utf-8").splitlines()):
        if row["category"] == "rag":
            *parts, question = row["turns"][0].split("\n")
            answers = row.get("reference") or []
            flat = [a for one in answers for a in (one if isinstance(one, list) else [one])]
            asked.append(Asked(question, range(len(passages), len(passages) + len(parts)), [str(a) for a in flat]))
            passages += parts
    return passages, asked


def bm25(passages: list[str], k: float = 1.2, b: float = 0.75) -> Ranking:
    """Robertson's, over words in lower case."""
    bags = [Counter(re.findall(r"\w+", text.lower())) for text in passages]
    lengths = [sum(bag.values()) for bag in bags]
    usual = sum(lengths) / len(lengths)
    of = Counter(word for bag in bags for word in bag)

    def rank(question: str) -> list[int]:
        scores = [0.0] * len(bags)
        for word in re.findall(r"\w+", question.lower()):
            rarity = math.log(1 + (len(bags) - of[word] + 0.5) / (of[word] + 0.5))
            for number, bag in enumerate(bags):
                if word in bag:
                    scores[number] += (
                        rarity * bag[word] * (k + 1) / (bag[word] + k * (1 - b + b * lengths[number] / usual))
                    )
        return sorted(range(len(bags)), key=lambda number: -scores[number])[:TOP]

    return rank


def seal(engine: outrider.Outrider, store: CompactStore, forget: bool = False) -> Ranking:
    """`forget`: the corpus frequency is left out, which must be worse."""
    encode = encoder(engine.tokenizer)

    def rank(question: str) -> list[int]:
        prompt, (words,) = engine.encode(documents.asking(question)), encode([" " + question])
        if not forget:
            return [one.document for one in documents.find(engine.target, prompt, words, store, TOP)]
        real, documents.worth = documents.worth, lambda log_prob, count, tokens: real(log_prob, 1, tokens)
        try:
            return [one.document for one in documents.find(engine.target, prompt, words, store, TOP)]
        finally:
            documents.worth = real

    return rank


def rates(name: str, rank: Ranking, passages: list[str], asked: list[Asked]) -> dict[str, object]:
    hits = first = answered = reciprocal = 0.0
    for one in asked:
        best = rank(one.question)
        places = [i for i, number in enumerate(best, 1) if number in one.passages]
        hits += bool(places)
        first += bool(places) and places[0] == 1
        reciprocal += 1 / places[0] if places else 0
        text = " ".join(passages[number] for number in best).lower()
        answered += any(answer.lower() in text for answer in one.answers)
    count = len(asked)
    return {"ranking": name, "questions": count, "hits@10": hits / count, "hits@1": first / count,
            "reciprocal": reciprocal / count, "answer@10": answered / count}  # fmt: skip


def built(passages: list[str], engine: outrider.Outrider, name: str, folder: Path) -> CompactStore:
    lines = "".join(json.dumps({"text": passage}) + "\n" for passage in passages)
    (folder / "passages.jsonl").write_text(lines, encoding="utf-8")
    build(folder / "passages.jsonl", engine.tokenizer, name, folder / "store")
    compact(folder / "store")
    return open_compact(folder / "store")


def rankings(arguments: argparse.Namespace, passages: list[str], folder: Path) -> Iterator[tuple[str, Ranking]]:
    yield "BM25", bm25(passages)
    for model in arguments.model:
        with outrider.load(model, method="plain", runtime=arguments.runtime) as engine:
            place = folder / Path(model).name
            place.mkdir()
            store = built(passages, engine, model, place)
            yield f"SEAL, {Path(model).name}", seal(engine, store)
            yield f"SEAL, {Path(model).name}, without the corpus frequency", seal(engine, store, forget=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("questions", type=Path)
    parser.add_argument("--model", action="append", default=[])
    parser.add_argument("--runtime", default="auto")
    parser.add_argument("--limit", type=int, default=None)
    arguments = parser.parse_args()
    passages, asked = read(arguments.questions)
    print(json.dumps({"passages": len(passages), "questions": len(asked)}))
    with tempfile.TemporaryDirectory() as folder:
        for name, rank in rankings(arguments, passages, Path(folder)):
            print(json.dumps(rates(name, rank, passages, asked[: arguments.limit])), flush=True)


if __name__ == "__main__":
    main()
