"""Compiled kernels for the CPU: products with packed weights, and threads that run them together."""
