"""Compiled code: how functions are compiled, and the arithmetic on rows of numbers that several parts share."""
