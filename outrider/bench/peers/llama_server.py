"""A stand-alone program: llama.cpp's HTTP server through `xllamacpp`, in an environment without Outrider.

Run: python llama_server.py MODEL.gguf PORT THREADS SLOTS CONTEXT
"""

from __future__ import annotations

import signal
import sys

import xllamacpp  # type: ignore[import-not-found]


def main() -> None:
    model, port, threads, slots, context = sys.argv[1], *(int(value) for value in sys.argv[2:6])
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.hostnames = ["127.0.0.1"]
    params.port = port
    params.cpuparams.n_threads = threads
    params.cpuparams_batch.n_threads = threads
    params.n_parallel = slots
    params.n_ctx = slots * context  # shared out between the slots
    params.n_gpu_layers = 0
    params.warmup = True
    server = xllamacpp.Server(params)
    print(f"listening on {server.listening_address}", flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    sys.exit(0)


if __name__ == "__main__":
    main()
