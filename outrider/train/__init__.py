"""Making drafters from nothing but the target: it writes the text (`selfdata`), a small model learns its law."""
