"""What a self-written conversation consists of: forced pieces (turn marks, openings, requests) and turns to sample.

The target's own chat template gives the marks. The openings make it write, as the user, questions, exercises, code and
passages to work on; the requests make it work on text that stands above, so that answers copy from long contexts. A
model without a chat template just writes on from its start token.
"""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from outrider.core.errors import InputError

FORCED, USER, ANSWER = 0, 1, 2  # roles of tokens

# How a user turn begins, how long the user must go on at least, and how the turn ends.
OPENINGS: tuple[tuple[str, int, str], ...] = (
    ("", 6, ""),
    ("", 6, ""),
    ("", 6, ""),
    ("", 6, ""),
    ("How ", 6, ""),
    ("What ", 5, ""),
    ("Who ", 5, ""),
    ("Write ", 6, ""),
    ("Explain ", 5, ""),
    ("Why ", 5, ""),
    ("Describe ", 5, ""),
    ("Compare ", 6, ""),
    ("Give me ", 5, ""),
    ("Help me ", 6, ""),
    ("Create ", 6, ""),
    ("Compose ", 6, ""),
    ("Draft an email ", 8, ""),
    ("Write a short story about ", 6, ""),
    ("Imagine you are ", 10, ""),
    ("Pretend to be ", 10, ""),
    ("Write a Python function that ", 8, ""),
    ("I am ", 16, ""),
    ("A store sells ", 24, " Solve this step by step."),
    ("Solve this problem: ", 20, ""),
    ("Translate this sentence into French: ", 10, ""),
    ("Translate the following text from German to English:\n\n", 16, ""),
    ("Summarize the following article:\n\n", 160, ""),
    ("Article:\n", 200, "\n\nSummarize the article above in a few sentences."),
    ("Text:\n", 140, "\n\nRewrite the text above in simpler words."),
    ("Correct the spelling and grammar of this text:\n\n", 60, ""),
    ("Read the passage and answer the question.\n\nPassage: ", 140, "\n\nQuestion: What is this passage about?"),
    ("Use these notes to answer.\n\nNote 1: ", 200, "\n\nQuestion: What do the notes say? Answer from the notes."),
    ("Here is some code:\n\n```python\n", 60, "\n```\n\nAdd comments and type hints to it."),
)

# Whole user turns about the answer above. An empty one is written by the model.
REQUESTS: tuple[str, ...] = (
    "",
    "",
    "",
    "Summarize your answer in two sentences.",
    "Rewrite your answer as a list of bullet points.",
    "Rewrite your answer in a more formal tone.",
    "Translate your answer into Spanish.",
    "Repeat your answer, but shorter.",
    "Explain this step by step.",
    "Give me an example.",
)

SENTINELS = ("first-user-turn", "the-answer", "second-user-turn")


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens that are forced, and the turn that is sampled after them."""

    tokens: tuple[int, ...]
    answer: bool  # the turn that follows is the model's own, not the user's
    least: int = 1  # fewest tokens of the turn
    then: tuple[int, ...] = ()  # the pieces that may follow it, by number


@dataclass(frozen=True, slots=True)
class Dialogue:
    """Pieces and how they follow each other; `ends` are the tokens with which a sampled turn ends."""

    pieces: tuple[Piece, ...]
    first: tuple[int, ...]
    ends: frozenset[int]
    marks: tuple[str, str, str] = ("", "", "")  # before the first user turn, before an answer, before a later user turn
    follow: tuple[int, ...] = ()  # the pieces that may follow an answer


def dialogue(tokenizer: PreTrainedTokenizerBase | None, eos_ids: frozenset[int], start: int) -> Dialogue:
    """The conversations of a chat model; for a model without a template, text after the token `start`."""
    if tokenizer is None or not tokenizer.chat_template:
        return Dialogue((Piece((start,), True),), (0,), frozenset())
    head, answer_mark, user_mark = template_marks(tokenizer)

    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False))

    openings, requests = len(OPENINGS), len(REQUESTS)
    follow = tuple(range(2 * openings, 2 * openings + requests))
    pieces = [
        Piece(ids(head + text), False, least, (openings + i,)) for i, (text, least, _) in enumerate(OPENINGS)
    ]  # a user turn begins
    pieces += [Piece(ids(tail + answer_mark), True, then=follow) for _, _, tail in OPENINGS]
    # A request leads straight to the answer; an empty one lets the user write, then the plain mark follows.
    pieces += [
        Piece(ids(user_mark + text + answer_mark), True, then=follow)
        if text
        else Piece(ids(user_mark), False, 4, (openings,))
        for text in REQUESTS
    ]
    ends = {ids(answer_mark)[0], ids(user_mark)[0], *eos_ids, *tokenizer.all_special_ids}
    return Dialogue(tuple(pieces), tuple(range(openings)), frozenset(ends), (head, answer_mark, user_mark), follow)


def template_marks(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str, str]:
    """The template's text before the first user turn, between it and the answer, and before the second user turn."""
    roles = ("user", "assistant", "user")
    messages = [{"role": role, "content": text} for role, text in zip(roles, SENTINELS, strict=True)]
    text = str(tokenizer.apply_chat_template(messages, tokenize=False))
    places = [text.find(sentinel) for sentinel in SENTINELS]
    if -1 in places or places != sorted(places):
        raise InputError("the chat template does not show the turns as they are; the model cannot write its own data")
    cuts = [0, *(place + len(sentinel) for place, sentinel in zip(places, SENTINELS, strict=True))]
    head, answer_mark, user_mark = (text[a:b] for a, b in zip(cuts[:-1], places, strict=True))
    return head, answer_mark, user_mark
