"""Drafters that go on learning from what is generated."""
