"""Constraints: what else reshapes the target's distribution before verification."""
