"""Drafters that copy: from the text itself, from finished texts, from a prediction or a corpus."""
