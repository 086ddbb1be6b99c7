"""Keeps Python's cyclic garbage collector cheap by freezing objects that live as long as the process.

A framework creates hundreds of thousands of such objects. While the collector counts them, it runs a full collection
only after a quarter as many new objects. Until then, which may take hours, every closed connection keeps its buffers,
because TLS and its exceptions contain reference cycles. Frozen objects cost nothing, and cycles are freed within
minutes.

The main programs (`broker.main`, `client.training.train`) call `set_aside_what_stays` after loading; modules that
import much at once (`cli.main`, `backends.registry`) use `loading`."""

from __future__ import annotations

import gc
import sys
from collections.abc import Generator
from contextlib import contextmanager


def set_aside_what_stays() -> None:
    """Collect garbage once, then exclude all live objects from later collections. Takes a moment.

    A later call examines everything again: objects that were frozen earlier and became garbage are freed too.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    gc.collect()  # resets the collector's count of live objects to nearly none


@contextmanager
def loading() -> Generator[None]:
    """Collect nothing while modules are imported, and exclude what they created from later collections.

    That includes the collection at the end of the process. Of a framework's 370,000 objects, 8,000 are garbage in
    cycles. Finding them takes a quarter of the import's time, so they stay until the next `set_aside_what_stays`.
    Without an import nothing is frozen. Several threads may use this at once.
    """
    enabled, known = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > known:
            gc.freeze()
            gc.collect()  # nothing to collect, but resets the collector's counts
        if enabled:
            gc.enable()
