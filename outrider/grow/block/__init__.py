"""Rules that grow a tree from the distributions of a whole block at once."""
