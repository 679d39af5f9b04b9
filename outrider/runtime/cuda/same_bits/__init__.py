"""Kernels whose rows have the same bits in any pass: sums in an order of absolute positions and the weights' shapes."""
