"""Measuring methods against plain decoding: the runner, the figures, the reports. No decoding logic."""
