"""`outrider batch`: a file of prompts through the schedule, to a file of results in the same order."""

from outrider.cli.batch.command import batch

__all__ = ["batch"]
