"""How far a peer's work is believed, and which part of it is therefore done again elsewhere. Pure.

The rule is BOINC's adaptive replication: whoever has not given `NEEDED` valid results one after the other has all of
its work checked; from then on work is checked with a probability that falls with the number of valid results, and
never below a floor; one that does not hold begins again. A result here is a *stretch*: what one stage did in the steps
from one snapshot to the next. The floor follows from a promise: a peer that falsifies one task in five (`CHEATED`) is
found within `PROMISED_TASKS` in 19 of 20 cases. A stretch of many tasks is checked as a whole or not at all, which
needs more checks for the same promise; beyond `MOST`, checks cost more than the promise is worth.

Peers must not know what will be checked. It is drawn when the stretch is over, from a secret that stays with the job
owner.

Sources: BOINC, `AdaptiveReplication`; 5 % of single tasks find 20 % within 300 (docs/decisions/0038). Neighbour:
`verification` holds one of these per peer.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

NEEDED: Final = 10
"""Valid stretches in a row before any goes unchecked."""
CHEATED: Final = 0.2
PROMISED_TASKS: Final = 300
MISSED: Final = 0.05
LEAST: Final = 0.05
"""Of the stretches, however trusted a peer is."""
MOST: Final = 0.10
"""Where the promise would need more of a trusted peer's work to be done twice, it is not kept."""


@dataclass(frozen=True, slots=True)
class Reputation:
    """`valid`: stretches in a row that held. `partners`: those whose word stood against this peer's."""

    valid: int = 0
    partners: frozenset[str] = frozenset()

    def held(self) -> Reputation:
        return Reputation(self.valid + 1, self.partners)

    def doubted(self, partner: str = "") -> Reputation:
        """Trust begins anew."""
        return Reputation(0, self.partners | ({partner} if partner else frozenset[str]()))

    def chance(self, tasks: int) -> float:
        """That a stretch of so many tasks (microbatches of a stage) is checked."""
        if self.valid < NEEDED:
            return 1.0
        return max(1.0 / self.valid, floor(tasks))


def floor(tasks: int) -> float:
    """Least part of the stretches of `tasks` tasks that is checked."""
    spoilt = 1 - (1 - CHEATED) ** tasks
    needed = (1 - MISSED ** (tasks / PROMISED_TASKS)) / spoilt
    return min(MOST, max(LEAST, needed))


def drawn(secret: bytes, peer: str, stage: int, first: int, chance: float) -> bool:
    """Whether this stretch is checked: the same for the same secret, a coin of `chance` for who does not know it."""
    content = f"{stage}:{first}:{peer}".encode()
    digest = hashlib.blake2b(content, key=secret, digest_size=8, person=b"spot check").digest()
    return int.from_bytes(digest, "little") < chance * 2**64
