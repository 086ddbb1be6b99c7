"""Pool of local processes for `fusion serve --local`: how many threads and how much memory each gets, and its speed.

`client.pool.local_pool` runs the processes, `client.serving.serve` serves on them."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Final

import msgspec

from fusionai.client.pool.local_pool import LocalPeer, LocalPool, local_home
from fusionai.primitives.errors import UsageError
from fusionai.scheduling.problem.calibration import typical_serving
from fusionai.scheduling.problem.types import PeerProfile

MOST_LOCAL: Final = 16
LOCAL_NAMES: Final = ("tower", "desktop", "laptop", "workshop", "bedroom", "attic")
OWNERS_SHARE: Final = 2
"""Share of the free memory for this machine's own process with `--local`, in shares of a local peer (chosen)."""


@asynccontextmanager
async def local_pool(
    home: Path, count: int, spares: int, *, hashes: Path, say: Callable[[str], None]
) -> AsyncIterator[LocalPool]:
    """Run a pool of `count` active peers and `spares` further ones during the block. Their homes are in a directory of
    `home`, which is removed afterwards. `hashes`: file with the hashes of model files, which the peers share."""
    if not 1 <= count <= MOST_LOCAL:
        raise UsageError(f"expected --local from 1 to {MOST_LOCAL}, got {count}.")
    import psutil

    machines = count + spares
    lent = psutil.virtual_memory().available // (machines + OWNERS_SHARE)
    peers = [
        LocalPeer(
            LOCAL_NAMES[number] if number < len(LOCAL_NAMES) else f"peer{number}",
            threads=local_threads(count),
            memory_bytes=lent,
            weights_beside=hashes,
        )
        for number in range(machines)
    ]
    with local_home(home / "local") as directory:
        async with LocalPool(directory, peers, name="local", say=say) as pool:
            yield pool


def local_threads(peers: int) -> int:
    """Return the threads per local process: its share of the cores, because stages of several sessions work at once."""
    return max(1, (os.cpu_count() or 1) // peers)


def own_memory_bytes(machines: int) -> int:
    """Return the memory for this machine's own process beside `machines` local peers."""
    import psutil

    return psutil.virtual_memory().available * OWNERS_SHARE // (machines + OWNERS_SHARE)


def equalised(profiles: tuple[PeerProfile, ...]) -> tuple[PeerProfile, ...]:
    """Return the profiles with median speeds. Local processes are equal, but measured their speed under each other's
    load."""
    flops_per_s = median(profile.flops_per_s for profile in profiles)
    bandwidth = median(profile.memory_bandwidth_bytes_per_s for profile in profiles)
    serving = typical_serving(profiles)
    attention_flops_per_s = median(profile.attention_flops_per_s for profile in profiles)
    return tuple(
        msgspec.structs.replace(
            profile,
            flops_per_s=flops_per_s,
            memory_bandwidth_bytes_per_s=bandwidth,
            serving=serving,
            attention_flops_per_s=attention_flops_per_s,
        )
        for profile in profiles
    )
