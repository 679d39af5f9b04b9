"""What runs the target: the slots that every runtime shares, one folder a backend, and which one is taken."""
