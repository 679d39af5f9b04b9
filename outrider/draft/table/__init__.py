"""Drafters that remember what followed a few tokens, or run ahead on guesses of the target's own."""
