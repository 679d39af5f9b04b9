"""Text to train on, written by the target itself."""
