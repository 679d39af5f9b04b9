"""Acceptance rules, one file each: which candidates of a token tree the target would have said itself.

A rule knows a tree, the target's probabilities and a source of noise; it knows no model and no drafter.
"""
