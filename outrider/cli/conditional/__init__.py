"""Commands for texts under a condition: drawn as the model's, given the condition, or found in a store."""
