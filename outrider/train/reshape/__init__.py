"""The same drafter in another shape."""
