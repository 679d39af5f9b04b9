"""What automata do to a step besides masking: cut what cannot be said out of drafts, and hang on what has to follow."""
