"""Populations of sequences: what takes several texts at once to draw or to find."""
