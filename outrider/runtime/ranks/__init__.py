"""One model over several processes, a GPU each: rank 0 decides what runs, the others run the same rows beside it."""
