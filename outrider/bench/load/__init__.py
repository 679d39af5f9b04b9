"""Load on HTTP servers: a lean client, the servers that can be asked, and the figures of a run."""
