"""Makes drafters from nothing but the target: it writes the text (`text/`), a small model learns to predict it."""
