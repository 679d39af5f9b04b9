"""How one trained layer is run: in torch, on kernels of our own, or as whole recorded proposals; `choice` picks."""
