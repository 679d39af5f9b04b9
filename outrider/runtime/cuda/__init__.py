"""The same models on a CUDA GPU: whole steps recorded as graphs of fused kernels."""
