"""An engine in a process of its own behind a local socket, started again when it dies.

`link.py` is the front's end, `worker.py` the engine's; `framing.py` and `records.py` say what crosses between them.
"""
