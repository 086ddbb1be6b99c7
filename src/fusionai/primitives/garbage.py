"""Objects that refer to each other in circles, which only Python's collector frees. Decides what it looks at.

A framework brings hundreds of thousands of objects that live as long as the process. As long as the collector counts
them, it looks at everything only once a quarter as many new ones have come: for hours, every closed connection keeps
its buffers, as TLS and its exceptions are full of circles. Set aside, they cost nothing, and circles go within minutes.

Neighbours: the programs' beginnings (`broker.main`, `client.train`), once they have loaded everything; whoever imports
much at once (`cli.main`, `backends.registry`), while it does.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Generator
from contextlib import contextmanager


def set_aside_what_stays() -> None:
    """Collect once, then leave what is alive out of later collections. Takes a moment. Said again, it looks at
    everything anew: what was set aside earlier and is of no use any more goes too."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    gc.collect()  # the collector counts anew how much there is: nearly nothing


@contextmanager
def loading() -> Generator[None]:
    """While modules are imported nothing is collected, and what they brought is left out of later collections, also of
    those at the process's end. Of a framework's 370,000 objects 8,000 are in circles and of no use. To find them takes
    a quarter as long as to import it, so they stay too, until the next `set_aside_what_stays`.

    If nothing was imported, nothing is set aside. Several threads may do so at once.
    """
    enabled, known = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > known:
            gc.freeze()
            gc.collect()  # of nothing: see above
        if enabled:
            gc.enable()
