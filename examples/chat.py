"""A chat in the terminal: answers stream, and what was said stays in the cache, so that a turn runs only what is new.

Run: python examples/chat.py          (an empty line leaves; `outrider chat` does more)
"""

import outrider

with outrider.load("smollm2") as engine:
    messages: list[dict[str, str]] = []
    while said := input("> ").strip():
        messages.append({"role": "user", "content": said})
        stream = engine.stream(messages, max_new_tokens=256)
        for piece in stream:
            print(piece, end="", flush=True)
        answer = stream.generation
        print(f"\n[{answer.stats.tokens_per_s:.0f} tokens/s, {answer.stats.mean_accepted:.1f} tokens a step]")
        messages.append({"role": "assistant", "content": answer.text})
