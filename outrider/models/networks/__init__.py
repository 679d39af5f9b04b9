"""The small networks that are trained to draft, one file a family: what they compute, not who sees whom.

They import nothing of the drafters that use them; `models/trained.py` loads them.
"""
