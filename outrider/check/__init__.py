"""How we know it is lossless: toy models, and the enumeration of every random outcome.

Tests and `outrider check` call it; nothing that decodes does.
"""
