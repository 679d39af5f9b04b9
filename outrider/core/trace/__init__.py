"""A record of every step of one sequence, for whoever wants to see what speculation did; off unless asked for."""
