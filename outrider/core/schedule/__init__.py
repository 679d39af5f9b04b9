"""Which sequences get rows in the next pass, and how requests of any thread come in and their text goes out.

What a server, or any program with several threads, needs of `Engine` (`core/engine.py`):

- `engine.submit(prompt, params, recipe, constraint=..., terms=Terms(...), listener=...)` from any thread, at any time,
  in no time: the prompt is checked here (`InputError`), a full queue says so (`FullQueue`), a closed engine too
  (`ClosedEngine`). Nothing runs. It gives a `Handle` with a number, `handle.id`.
- `Terms(priority=0, caller="", cache_salt="", resume_from=(), sample=0)`: a lower priority is served first, as in vLLM,
  and waiting lowers it; callers share fairly, whatever one of them floods; only requests with the same salt share
  prefixes; `resume_from` are tokens said already (or a partial `Generation` of them, with its statistics): the text
  goes on behind them under the invariant rule as if it had never been interrupted, and they count for limits,
  penalties, stops and statistics, but are not delivered again; `sample` is the number of the first of its samples, a
  part of the key of its noise.
- `listener(delivery)` is called in the thread that steps, after every step that brought something to a sample: a
  `Delivery` with its new text and tokens, and with the last one the `Generation` or the error. It must be quick, such
  as `queue.put` or `loop.call_soon_threadsafe`; it may submit and cancel, and must not step or wait. One that raises
  ends its request.
- `engine.cancel(id)`, or `handle.cancel()`, from any thread: the request leaves before the next step; what it has said
  is delivered with the reason `cancelled`.
- `engine.work(stop)` steps as long as there is something to do and waits where there is not: run it in a thread, until
  the `threading.Event` is set or the engine closed. `engine.wait_for_work(timeout)` and `engine.step()` are its parts.
- Without such a thread whoever wants a result steps: `handle.results()`, `handle.pieces()` and `engine.step()` may be
  called from several threads. One steps at a time; the others wait, and find what its steps brought them too.
- `engine.watch(callback)` is told a `StepReport` after every step: seconds in draft, verify and rest, rows, accepted
  tokens, who runs and who waits. It gives back a function that ends it. `engine.steps` counts them.
"""

from outrider.core.schedule.handle import Delivery, Handle, Listener, StepReport, Terms, Watcher
from outrider.core.schedule.prompts import run_all, run_texts

__all__ = ["Delivery", "Handle", "Listener", "StepReport", "Terms", "Watcher", "run_all", "run_texts"]
