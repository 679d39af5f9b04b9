"""The core: trees, draws, sampling, noise, protocols and the loop; it knows token ids and no model or method."""
