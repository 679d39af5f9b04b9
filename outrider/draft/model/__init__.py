"""Drafters that are language models: smaller ones, the target's first layers, ones with another vocabulary."""
