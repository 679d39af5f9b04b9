"""Growers: one file a rule of unrolling a source's next-token distributions into a tree."""
