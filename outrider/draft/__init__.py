"""Drafters: one file a way of proposing. Each can be wrong, never harmful."""
