"""`outrider chat`: a conversation in the terminal. Lines from a pipe work as well as a keyboard."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.options import ModelOptions, SamplingOptions, StyleOptions
from outrider.cli.output import err, stats_table, status_line
from outrider.cli.shell import on_interrupt
from outrider.core.errors import InputError, OutriderError

if TYPE_CHECKING:
    from outrider.core.generation import Stats
    from outrider.core.params import SamplingParams

HELP = "/reset forgets the conversation · /help names the other commands · /exit leaves · Ctrl-C stops an answer"
COMMANDS = {
    "/system TEXT": "another system message; without text: none",
    "/retry": "the last answer once more",
    "/continue": "go on where the last answer ended",
    "/method NAME": "draft by another method from now on",
    "/save FILE": "keep the conversation as JSON",
    "/load FILE": "go on with a conversation that was kept",
    "/reset": "forget the conversation",
    "/stats": "statistics of the session",
    "/exit": "leave",
}
FENCE = '"""'  # around a message of several lines
LINES = 1000  # of history at the prompt


def chat(
    system: Annotated[str | None, typer.Option("--system", help="A system message to begin with.")] = None,
    *,
    model: ModelOptions,
    sampling: SamplingOptions,
    style: StyleOptions,
) -> None:
    """Talk with a model; answers stream, with tokens/s and accepted length after each.

    /help names the commands. A line that ends with a backslash goes on in the next; so does all between two lines of
    three quotes. Ctrl-C stops an answer and keeps what was said; a second Ctrl-C, or Ctrl-D, leaves.
    """
    params = sampling.params(max_new_tokens=512)
    if params.n != 1:
        raise InputError("--samples: a chat has one answer a turn; leave it out")
    style.check()
    with model.load() as engine:
        prior = style.constraint(engine)
        extra = sampling.extra | ({"constraint": prior} if prior else {})
        session = _Session(engine, params, extra, system)
        err().print(f"{model.model} with {model.method} · {HELP}", style="dim")
        with contextlib.suppress(KeyboardInterrupt):
            for line in _messages(_lines()):
                if not session.take(line.strip()):
                    break
        err().print("bye", style="dim")


def _messages(lines: Iterator[str]) -> Iterator[str]:
    """Lines joined to messages, where they say that they go on."""
    for line in lines:
        text = line.rstrip("\n")
        if text.strip() == FENCE:
            held = []
            for more in lines:
                if more.strip() == FENCE:
                    break
                held.append(more.rstrip("\n"))
            yield "\n".join(held)
            continue
        while text.endswith("\\"):
            text = text[:-1] + "\n" + next(lines, "").rstrip("\n")
        yield text


def _lines() -> Iterator[str]:
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    with _history():
        while True:
            try:
                yield input("> ")
            except EOFError:
                sys.stderr.write("\n")
                return


@contextlib.contextmanager
def _history() -> Iterator[None]:
    """Editing and history at the prompt, where this Python can; kept from one chat to the next."""
    try:
        import readline
    except ImportError:
        yield
        return
    from platformdirs import user_state_path

    file = user_state_path("outrider") / "chat_history"
    with contextlib.suppress(OSError):
        readline.read_history_file(file)
    readline.set_history_length(LINES)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(file)


class _Session:
    """The history of one conversation and its pooled statistics. Changes state with every line."""

    def __init__(self, engine: Any, params: SamplingParams, extra: dict[str, Any], system: str | None) -> None:
        self.engine, self.params, self.extra = engine, params, extra
        self.opening = [{"role": "system", "content": system}] if system else []
        self.messages = list(self.opening)
        self.total: Stats | None = None
        self.method: str | None = None  # None: the engine's

    def take(self, line: str) -> bool:
        """One message or command from the user; False ends the session."""
        if line == "/exit":
            return False
        if not line.startswith("/"):
            if line:
                self._answer([*self.messages, {"role": "user", "content": line}])
            return True
        name, _, rest = line.partition(" ")
        act: dict[str, Callable[[str], None]] = {
            "/reset": self._reset, "/stats": self._stats, "/system": self._system, "/retry": self._retry,
            "/continue": self._continue, "/method": self._method, "/save": self._save, "/load": self._load,
        }  # fmt: skip
        try:
            act.get(name, self._help)(rest.strip())
        except OutriderError as error:
            err().print(f"error: {error}", markup=False)
        return True

    def _help(self, _: str) -> None:
        err().print(HELP, style="dim")
        for name, what in COMMANDS.items():
            err().print(f"{name:14} {what}", style="dim", markup=False, highlight=False)

    def _reset(self, _: str) -> None:
        self.messages = list(self.opening)
        err().print("forgotten", style="dim")

    def _stats(self, _: str) -> None:
        err().print(stats_table(self.total) if self.total else "nothing was said yet")

    def _system(self, text: str) -> None:
        said = self.messages[len(self.opening) :]
        self.opening = [{"role": "system", "content": text}] if text else []
        self.messages = [*self.opening, *said]
        err().print("system message set" if text else "no system message", style="dim")

    def _retry(self, _: str) -> None:
        if not self.messages or self.messages[-1]["role"] != "assistant":
            raise InputError("there is no answer yet to be tried again; say something first")
        self._answer(self.messages[:-1])

    def _continue(self, _: str) -> None:
        if not self.messages or self.messages[-1]["role"] != "assistant":
            raise InputError("there is no answer yet to go on with; say something first")
        self._answer(self.messages[:-1], begun=str(self.messages[-1]["content"]))

    def _method(self, name: str) -> None:
        from outrider import methods

        methods.check(name)
        self.method = name
        err().print(f"method {name} from now on", style="dim", markup=False)

    def _save(self, name: str) -> None:
        if not name:
            raise InputError("/save needs the name of a file")
        path = Path(name).expanduser()
        if path.exists() and not _is_conversation(path):
            raise InputError(f"{name}: exists and is no conversation; choose another file")
        from outrider.core.files import check_place, write_atomic

        check_place(path, name)
        write_atomic(path, json.dumps({"messages": self.messages}, ensure_ascii=False, indent=1) + "\n")
        err().print(f"{len(self.messages)} messages kept in {name}", style="dim", markup=False)

    def _load(self, name: str) -> None:
        path = Path(name).expanduser()
        if not name or not _is_conversation(path):
            raise InputError(f"{name or '/load'}: no conversation there; give a file that /save wrote")
        self.messages = json.loads(path.read_text(encoding="utf-8"))["messages"]
        self.opening = [message for message in self.messages[:1] if message["role"] == "system"]
        err().print(f"{len(self.messages)} messages read", style="dim")

    def _answer(self, asked: list[dict[str, str]], begun: str = "") -> None:
        """The next message behind `asked`, or the rest of one that has begun."""
        extra = self.extra | ({"method": self.method} if self.method else {})
        prompt: Any = asked
        try:
            if begun:
                last = {"role": "assistant", "content": begun}
                prompt = self.engine.encode_chat([*asked, last], continue_final_message=True)
            handle = self.engine.submit(prompt, self.params, **extra)
        except InputError as error:  # most often a conversation longer than the context
            err().print(f"error: {error}; /reset begins anew", markup=False)
            return
        with on_interrupt(handle.cancel):
            for piece in handle.pieces():
                sys.stdout.write(piece)
                sys.stdout.flush()
            answer = handle.result()
        sys.stdout.write("\n")
        sys.stdout.flush()
        self.messages = [*asked, {"role": "assistant", "content": begun + answer.text}]
        note = " · stopped" if answer.finish_reason == "cancelled" else ""
        err().print(status_line(answer.stats) + self._plainly(answer.stats) + note, style="dim")
        self._count(answer.stats)

    def _plainly(self, stats: Stats) -> str:
        """What plain decoding would have taken, by what its steps were measured to take."""
        costs = getattr(self.engine.recipe(self.method), "costs", None)
        if costs is None or not stats.new_tokens:
            return ""
        each = float(costs.seconds(1, 0, stats.prompt_tokens)[0])
        took = stats.draft_s + stats.verify_s + stats.rest_s
        return f" · {took:.1f} s, plainly about {each * stats.new_tokens:.1f} s"

    def _count(self, stats: Stats) -> None:
        if self.total is None:
            self.total = type(stats)(method=stats.method)
        self.total.add(stats)


def _is_conversation(path: Path) -> bool:
    try:
        said = json.loads(path.read_text(encoding="utf-8"))["messages"]
        return all(isinstance(m["content"], str) and isinstance(m["role"], str) for m in said)
    except (OSError, ValueError, KeyError, TypeError):
        return False
