"""Llama-like models on the CPU: a whole step as one compiled call."""
