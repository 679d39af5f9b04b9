"""The retrieval store: a tokenised corpus and its suffix array on disk, memory-mapped, searched by compiled code.

`build` makes and grows stores, the rest reads them; reading needs no extra package.
"""

from outrider.store.store import Match, Reach, Store, open_store

__all__ = ["Match", "Reach", "Store", "open_store"]
