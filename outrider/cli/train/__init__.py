"""`outrider train ...`: drafters made from nothing but the target."""
