"""Other runtimes as systems of the bench: one adapter file each, run by `worker.py` in an environment of its own."""
