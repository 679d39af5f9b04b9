"""Drafters trained on the target's hidden states."""
