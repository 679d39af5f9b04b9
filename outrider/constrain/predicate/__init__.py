"""Constraints that are programs: whatever says of a text whether it may go on, asked about few tokens."""
