"""CPU share of a session of processes relative to others. The operating system may ignore it.

Linux groups processes by session (`setsid`) and shares the processors between groups ("autogroup", sched(7)). Users may
lower and later raise the weight of their own groups, which `nice` does not allow. On other systems, and inside
containers and services that have a group of their own, nothing changes. `client.pool.local_pool` uses this for
processes it starts beside working ones."""

from __future__ import annotations

from pathlib import Path

ORDINARY = 0
YIELDING = 10
"""About a tenth of an ordinary group's share if both are busy; all of the processor if no other group is."""


def weigh_session(leader: int, niceness: int) -> bool:
    """Set the niceness, 0 to 19, of the session that process `leader` began.

    Returns False if the system has no autogroups or the process is gone.
    """
    try:
        Path(f"/proc/{leader}/autogroup").write_text(str(niceness))
    except OSError:
        return False
    return True
