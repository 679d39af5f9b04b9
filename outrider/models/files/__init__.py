"""A model's files, piece by piece: single tensors, and the model around them without its weights."""
