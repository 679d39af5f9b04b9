"""A caller's function with a limit on its time: one that raises or does not answer ends a request, not the engine.

`InThread` calls a function of this process. It stops a Python loop; what never gives the interpreter back (a regular
expression that backtracks for ever) stops everything, so what is not known to end belongs into a file: `InProcess` runs
the functions of a Python file in a process that can be killed. Cost: tens of microseconds a call.
"""

from __future__ import annotations

import ctypes
import json
import queue
import selectors
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from outrider.core.errors import InputError, PredicateFailed

Answers = Callable[[str], object]
SECONDS = 1.0  # a call
TO_LOAD = 60.0  # seconds for a file and what it imports
TAIL = 40  # characters of a text that an error shows
WORKER = Path(__file__).with_name("worker.py")


class InThread:
    """Calls functions in a thread of its own; the thread is left behind where one does not end."""

    def __init__(self, functions: dict[str, Answers], seconds: float = SECONDS) -> None:
        self.seconds = _checked(seconds)
        self._functions = functions
        self._thread: _Thread | None = None

    def has(self, name: str) -> bool:
        return name in self._functions

    def __call__(self, name: str, text: str) -> bool:
        if self._thread is None:
            self._thread = _Thread()
        answer = self._thread.ask(self._functions[name], text, self.seconds)
        if answer is None:
            self._thread.stop()
            self._thread = None
            raise _late(name, text, self.seconds)
        found, error = answer
        if error is not None:
            raise _failed(name, text, f"{type(error).__name__}: {error}") from error
        return found

    def close(self) -> None:
        if self._thread is not None:
            self._thread.stop()
            self._thread = None


class _Thread:
    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[tuple[Answers, str] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[bool, BaseException | None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="outrider-predicate", daemon=True)
        self._thread.start()

    def ask(self, function: Answers, text: str, seconds: float) -> tuple[bool, BaseException | None] | None:
        self._asked.put((function, text))
        try:
            return self._answers.get(timeout=seconds)
        except queue.Empty:
            return None

    def stop(self) -> None:
        """Ends the thread when its function comes back to Python, if it ever does."""
        self._asked.put(None)
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread.ident), ctypes.py_object(_Stopped))

    def _run(self) -> None:
        try:
            while (asked := self._asked.get()) is not None:
                function, text = asked
                try:
                    self._answers.put((bool(function(text)), None))
                except Exception as error:
                    self._answers.put((False, error))
        except _Stopped:
            return


class _Stopped(BaseException):
    """Raised in a thread whose function took too long."""


class InProcess:
    """Functions of a Python file, in a process that is begun at the first call and again after it was killed."""

    def __init__(self, file: str | Path, seconds: float = SECONDS) -> None:
        self.seconds, self.file = _checked(seconds), Path(file)
        if not self.file.is_file():
            raise InputError(f"predicate {file}: no such file; give a Python file with a function viable(text)")
        self._process: subprocess.Popen[str] | None = None
        self._names: frozenset[str] = frozenset()

    def has(self, name: str) -> bool:
        self._begin()
        return name in self._names

    def __call__(self, name: str, text: str) -> bool:
        self._begin()
        said = self._ask({"name": name, "text": text}, self.seconds)
        if said is None:
            self.close()
            raise _late(name, text, self.seconds)
        if "error" in said:
            raise _failed(name, text, said["error"])
        return bool(said["answer"])

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()

    def _begin(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        command = [sys.executable, str(WORKER), str(self.file)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        said = self._ask({}, TO_LOAD)
        if said is None or "error" in said:
            self.close()
            why = "does not load in a minute" if said is None else f"does not load: {said['error']}"
            raise InputError(f"predicate {self.file}: {why}")
        self._names = frozenset(said["names"])
        if "viable" not in self._names:
            self.close()
            raise InputError(
                f"predicate {self.file}: has no function viable(text); write one that says if a text may go on"
            )

    def _ask(self, what: dict[str, str], seconds: float) -> dict[str, Any] | None:
        """One line there and one back; None where none came."""
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(what) + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            return {"error": "its process has ended"}
        with selectors.DefaultSelector() as waiting:
            waiting.register(process.stdout, selectors.EVENT_READ)
            if not waiting.select(seconds):
                return None
        line = process.stdout.readline()
        return json.loads(line) if line else {"error": "its process has ended"}


def _checked(seconds: float) -> float:
    if not seconds > 0:
        raise InputError(f"a predicate's time limit of {seconds} seconds: use a number above 0")
    return seconds


def _late(name: str, text: str, seconds: float) -> PredicateFailed:
    return PredicateFailed(
        f"the predicate's {name} gave no answer in {seconds:g} s {_where(text)}; raise the limit or mend it"
    )


def _failed(name: str, text: str, why: str) -> PredicateFailed:
    return PredicateFailed(f"the predicate's {name} raised {why} {_where(text)}; let it answer True or False")


def _where(text: str) -> str:
    return f"for a text that ends in {text[-TAIL:]!r}" if text else "for the empty text"
