"""Which texts a cache holds: blocks with their holders, prefixes found by content, and who gets room for what."""
