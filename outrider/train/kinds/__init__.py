"""One file a kind of drafter: its network, its loss, its plan."""
