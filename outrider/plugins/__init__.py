"""Outrider's model-free drafters inside other engines: what those engines load by an entry point."""
