"""Drafters that say a whole block of tokens in one forward pass."""
