"""Growers: one file a rule of unrolling a source's next-token laws into a tree."""
