"""The rows of a step of many sequences: what is changed in them, what is chosen from them, what becomes text."""
