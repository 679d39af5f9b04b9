"""What a model's text means: reasoning apart from the answer, and calls of tools, in pieces while it streams."""
