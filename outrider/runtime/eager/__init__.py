"""Any model that transformers loads, on PyTorch, layer by layer."""
