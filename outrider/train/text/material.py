"""Conversations about text the model wrote earlier: passages to summarise and question, code to change.

The target's own answers come back as the material of new user turns, so that its drafter learns to copy from long
contexts. Tokens are joined as they are, without another tokenisation. Makes pieces of a dialogue; samples nothing.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from outrider.train.text.dialogue import ANSWER, Dialogue, Piece

# What stands before and after the material. {question} is the user turn that the material answered.
ABOUT_TEXT: tuple[tuple[str, str], ...] = (
    ("Summarize: ", ""),
    ("Summarize the following article:\n\n", ""),
    ("Article:\n", "\n\nSummarize the article above in a few sentences."),
    ("Give the main points of this text as a list:\n\n", ""),
    ("Text:\n", "\n\nRewrite the text above in simpler words."),
    ("Correct the mistakes in this text and write it out again:\n\n", ""),
    ("Read the passage and answer the question.\n\nPassage: ", "\n\nQuestion: What is this passage about?"),
    ("Translate the following text into French:\n\n", ""),
)
ABOUT_QUESTION: tuple[tuple[str, str], ...] = (
    ("Context:\n", "\n\nAnswer from the context above.\n\nQuestion: {question}"),
    ("Use these notes to answer.\n\nNotes: ", "\n\nQuestion: {question}"),
)
ABOUT_CODE: tuple[tuple[str, str], ...] = (
    ("Here is some code:\n\n", "\n\nAdd comments and type hints to it."),
    ("", "\n\nRename the variables in this code to better names and show all of it."),
    ("Fix the errors in this code:\n\n", ""),
)
MIN_TOKENS = 60  # tokens of an answer that is worth working on
JOIN = "\n\n"  # between two answers


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer of an earlier conversation, with the user turn it answered where that began the conversation."""

    tokens: tuple[int, ...]
    question: tuple[int, ...] = ()


def answers_in(
    tokens: NDArray[np.int64], roles: NDArray[np.uint8], head: int, mark: int, ends: frozenset[int]
) -> list[Answer]:
    """The answers of one conversation; `head` and `mark` are the lengths of the marks around the first user turn."""
    spoken = np.flatnonzero(np.diff(np.concatenate([[0], roles == ANSWER, [0]])))  # starts and ends, in turn
    found = []
    for number, (start, end) in enumerate(zip(spoken[::2].tolist(), spoken[1::2].tolist(), strict=True)):
        said = tokens[start:end][~np.isin(tokens[start:end], list(ends))].tolist()
        asked = tuple(tokens[head : start - mark].tolist()) if number == 0 else ()
        if len(said) >= MIN_TOKENS and end < len(tokens):  # one that the sequence's end cut off is half a thought
            found.append(Answer(tuple(said), asked))
    return found


def about(
    script: Dialogue, tokenizer: PreTrainedTokenizerBase, answers: Sequence[Answer], count: int, room: int, seed: int
) -> Dialogue:
    """The same dialogue, begun by `count` user turns that carry earlier answers, of at most `room` tokens each."""
    rng = random.Random(seed)
    head, mark, _ = script.marks

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    known = {text: ids(text) for pair in (*ABOUT_TEXT, *ABOUT_CODE) for text in pair}
    first, close, join, fence = ids(head), ids(mark), ids(JOIN), set(ids("\n```")) - set(ids("\n"))
    pieces = []
    for _ in range(count):
        main = rng.choice(answers)
        body = list(main.tokens)
        if fence & set(body):
            before, after = (known[text] for text in rng.choice(ABOUT_CODE))
        elif main.question and rng.random() < 0.4:
            text, end = rng.choice(ABOUT_QUESTION)
            before, after = ids(text), [*ids(end.partition("{question}")[0]), *main.question]
        else:
            before, after = (known[text] for text in rng.choice(ABOUT_TEXT))
        if rng.random() < 0.5:  # longer material, of which not all matters
            other = list(rng.choice(answers).tokens)
            body = [*body, *join, *other] if rng.random() < 0.5 else [*other, *join, *body]
        pieces.append(Piece((*first, *before, *body[:room], *after, *close), True, then=script.follow))
    start = len(script.pieces)
    return replace(script, pieces=(*script.pieces, *pieces), first=tuple(range(start, start + count)))
