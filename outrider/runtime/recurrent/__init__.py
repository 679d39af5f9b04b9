"""Layers whose memory is a state, not keys and values: run over token trees, committed, and taken up again."""
