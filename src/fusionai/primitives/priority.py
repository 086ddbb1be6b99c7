"""How much of the processors a session of processes gets beside others. Decides nothing: a wish, granted if possible.

Linux groups processes by session (`setsid`) and shares the processors between groups ("autogroup", sched(7)); a group's
weight may be lowered and raised again by its own user, which no `nice` allows. Elsewhere, and inside containers and
services that have a group of their own, nothing changes.

Neighbours: `client.local_pool` starts processes beside working ones.
"""

from __future__ import annotations

from pathlib import Path

ORDINARY = 0
YIELDING = 10
"""About a tenth of an ordinary group's share where both want all they can get; all of it where nobody else does."""


def weigh_session(leader: int, niceness: int) -> bool:
    """Give the session that process `leader` began this niceness, 0 to 19. False where the system has no such thing or
    the process is gone."""
    try:
        Path(f"/proc/{leader}/autogroup").write_text(str(niceness))
    except OSError:
        return False
    return True
