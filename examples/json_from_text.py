"""Facts from a text as JSON: every answer parses, and most of it is drafted from the schema.

Run: python examples/json_from_text.py ["a text about a person"]
"""

from __future__ import annotations

import json
import sys

import outrider

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer"},
        "city": {"type": "string", "maxLength": 30},
        "hobbies": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 3},
    },
    "required": ["name", "age", "city", "hobbies"],
    "additionalProperties": False,
}
TEXT = "Ada Lindqvist, 36, lives in Lund. At weekends she rows, plays chess and repairs old radios."


def main() -> None:
    text = sys.argv[1] if len(sys.argv) > 1 else TEXT
    with outrider.load("smollm2") as engine:
        made = engine.chat(f"{text}\n\nGive the facts about this person as JSON.", json_schema=SCHEMA)
    if made.finish_reason != "eos":
        sys.exit(f"the answer was cut ({made.finish_reason}): ask for more tokens")
    print(json.dumps(json.loads(made.text), indent=2, ensure_ascii=False))
    drafted = sum(bool(origin.drafter) for origin in made.origins)
    print(f"{made.stats.steps} steps for {made.stats.new_tokens} tokens, {drafted} of them drafted; the model gave "
          f"{made.mean_legal_mass:.2f} of its probability to what the schema allows", file=sys.stderr)  # fmt: skip


if __name__ == "__main__":
    main()
