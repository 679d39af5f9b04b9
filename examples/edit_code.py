"""Editing code: the answer will be much like the file, so the file is given as the prediction, and most is drafted.

Run: python examples/edit_code.py
"""

from __future__ import annotations

import outrider

CODE = """\
class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        return self.items.pop()

    def __len__(self):
        return len(self.items)
"""
ASKED = "Rename the class `Stack` to `Pile` and write out all the code."
MESSAGES = [
    {"role": "user", "content": f"```python\n{CODE}```\n\n{ASKED}"},
    {"role": "assistant", "content": "```python\n"},  # the answer has begun: what comes is code
]


def main() -> None:
    asked = {"continue_final_message": True, "stop": "```", "max_new_tokens": 128}
    with outrider.load("smollm2") as engine:
        edited = engine.chat(MESSAGES, prediction=CODE, **asked)
        plain = engine.chat(MESSAGES, method="plain", **asked)
    print(edited.text)
    print(f"the same text as plain decoding: {edited.text == plain.text}")
    print(f"passes through the model: {edited.stats.steps} with the prediction, {plain.stats.steps} without drafting")


if __name__ == "__main__":
    main()
