"""Objects that refer to each other in circles, which only Python's collector frees. Decides what it looks at.

A framework brings hundreds of thousands of objects that live as long as the process. As long as the collector counts
them, it looks at everything only once a quarter as many new ones have come: for hours, every closed connection keeps
its buffers, as TLS and its exceptions are full of circles. Set aside, they cost nothing, and circles go within minutes.

Neighbours: the programs' beginnings (`peer.daemon`, `broker.main`, `client.train`), once they have loaded everything.
"""

from __future__ import annotations

import gc


def set_aside_what_stays() -> None:
    """Collect once, then leave what is alive out of later collections. Takes a moment. Said again, it looks at
    everything anew: what was set aside earlier and is of no use any more goes too."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    gc.collect()  # the collector counts anew how much there is: nearly nothing
