"""FM-indexes: a corpus compressed so that what occurs in it can still be counted, gone on from, and found."""
