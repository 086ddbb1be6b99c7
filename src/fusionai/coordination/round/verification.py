"""Spot checks of a job: which work of a peer is computed again by which machine, and which peer each outcome
discredits.

*What is checked.* An *audit interval* is what one stage did in the steps from one snapshot to the next (in serving, in
the passes of one text). Its standby has the state at the beginning, its neighbours retain what they sent to it, and all
of them report sketches (projections under keys of their own) of what they received and sent. The standby, as
*verifier*, computes the audit interval again and reports its own sketches.

*How often.* The rule is BOINC's `AdaptiveReplication`: a peer without `NEEDED` valid audit intervals in a row has all
of its work checked. After that an interval is checked with a probability that falls with the number of valid ones, but
not below a floor. One invalid interval restarts the count. The floor ensures that a peer which falsifies one task in
five (`CHEATED`) is found within `PROMISED_TASKS` in 19 of 20 cases (docs/decisions/0038). An interval of many tasks is
checked as a whole or not at all, which needs more checks for the same probability, up to `MOST`. Peers can't predict
what is checked: it is drawn after the interval from a secret of the job owner.

*Who is at fault.* One other peer's report convicts no peer. If the verifier contradicts the peer, the job owner's
machine computes the interval too, and the peer that it contradicts is faulty. If two neighbours contradict each other
about what they exchanged, no third machine can tell which is wrong: both are checked all the time from then on, and a
peer is expelled if it contradicts two others, or the same neighbour again.

Neighbours: the drivers' machines own an `Inspector` and act on its verdicts; `training.inspection` and
`serving.inspection` compare sketches and form an `Opinion`."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

NEEDED: Final = 10
"""Valid audit intervals in a row before any goes unchecked."""
CHEATED: Final = 0.2
PROMISED_TASKS: Final = 300
MISSED: Final = 0.05
LEAST: Final = 0.05
"""Lower limit of the fraction of audit intervals that are checked, however trusted a peer is."""
MOST: Final = 0.10
"""Upper limit of that fraction for a trusted peer; beyond it, checks cost more than `PROMISED_TASKS` is worth."""


@dataclass(frozen=True, slots=True)
class Reputation:
    """`valid`: valid audit intervals in a row. `partners`: peers that contradicted this peer."""

    valid: int = 0
    partners: frozenset[str] = frozenset()

    def held(self) -> Reputation:
        return Reputation(self.valid + 1, self.partners)

    def doubted(self, partner: str = "") -> Reputation:
        """Return the reputation after a doubt: the count of valid intervals restarts."""
        return Reputation(0, self.partners | ({partner} if partner else frozenset[str]()))

    def chance(self, tasks: int) -> float:
        """Probability that an audit interval of this many tasks (microbatches of a stage) is checked."""
        if self.valid < NEEDED:
            return 1.0
        return max(1.0 / self.valid, floor(tasks))


def floor(tasks: int) -> float:
    """Lower limit of the fraction of audit intervals with `tasks` tasks that are checked."""
    spoilt = 1 - (1 - CHEATED) ** tasks
    needed = (1 - MISSED ** (tasks / PROMISED_TASKS)) / spoilt
    return min(MOST, max(LEAST, needed))


def drawn(secret: bytes, peer: str, stage: int, first: int, chance: float) -> bool:
    """Return whether this audit interval is checked: determined by the secret, a coin of `chance` without it."""
    content = f"{stage}:{first}:{peer}".encode()
    digest = hashlib.blake2b(content, key=secret, digest_size=8, person=b"spot check").digest()
    return int.from_bytes(digest, "little") < chance * 2**64


DISPUTED: Final = "what it says it got or gave is not what its neighbour says"


@dataclass(frozen=True, slots=True)
class Check:
    """Steps `first` to `below` - 1 of `stage`, which `peer` ran, are run again by `verifier`."""

    stage: int
    peer: str
    verifier: str
    first: int
    below: int


@dataclass(frozen=True, slots=True)
class Opinion:
    """Result of a check. `inputs`: neighbours that sent something else than the peer says it received. `own`:
    description of how the verifier's results differ from the peer's. `links`: neighbours that received something else
    than the peer says it sent, where the verifier confirms the peer. `void`: why there is no opinion."""

    inputs: frozenset[str] = frozenset()
    own: str = ""
    links: frozenset[str] = frozenset()
    void: str = ""


Outcome = Literal["valid", "accused", "disputed", "void"]

OUTCOMES: Final[Mapping[tuple[bool, bool, bool], Outcome]] = {
    # (inputs agree, the peer's own word agrees, its neighbours' word agrees)
    (True, True, True): "valid",
    (True, True, False): "disputed",
    (True, False, True): "accused",
    (True, False, False): "accused",
    # Different inputs give different results, so the results prove nothing.
    (False, True, True): "disputed",
    (False, True, False): "disputed",
    (False, False, True): "disputed",
    (False, False, False): "disputed",
}


def outcome_of(opinion: Opinion) -> Outcome:
    if opinion.void:
        return "void"
    return OUTCOMES[not opinion.inputs, not opinion.own, not opinion.links]


@dataclass(frozen=True, slots=True)
class CheckVerdict:
    """Consequence of an answer. `faulty_peer`: peer that is expelled, empty for none; its work from step `trusted` on
    is void. `again`: check to be repeated on the job owner's machine. `partners`: in a dispute, the peers that
    contradict the checked one."""

    outcome: Outcome
    reason: str = ""
    faulty_peer: str = ""
    trusted: int = 0
    again: Check | None = None
    partners: tuple[str, ...] = ()


@dataclass(slots=True)
class Inspector:
    """Spot checks of one job. `secret` determines what is checked and must stay with the owner. `owner`: peer id of the
    job owner, which decides last. `tasks_per_step`: microbatches that cross a stage."""

    secret: bytes
    owner: str
    tasks_per_step: int
    reputations: dict[str, Reputation] = field(default_factory=dict[str, Reputation])
    open: dict[int, Check] = field(default_factory=dict[int, Check])
    """Stage -> the check under way."""
    faulty_peers: set[str] = field(default_factory=set[str])
    checked_tasks: int = 0
    tasks: int = 0
    _accusations: dict[int, tuple[Check, str]] = field(default_factory=dict[int, tuple[Check, str]])
    """Stage -> the verifier's check and its words, while the owner's machine runs the audit interval."""
    _trusted: dict[tuple[int, str], int] = field(default_factory=dict[tuple[int, str], int])
    """(stage, peer) -> the step up to which its work is not in doubt: the end of its last valid audit interval."""

    @property
    def hold(self) -> int | None:
        """Return the first step whose retained tensors a check still needs, or None."""
        return min((check.first for check in self.open.values()), default=None)

    def due(self, places: Mapping[int, str], standbys: Mapping[int, str], first: int, below: int) -> tuple[Check, ...]:
        """The audit interval [first, below) is over at all stages with standbys: return the checks to run. The owner's
        own stages are not checked, and no peer checks itself."""
        checks: list[Check] = []
        for stage, verifier in sorted(standbys.items()):
            peer = places[stage]
            if peer in (verifier, self.owner):
                continue
            tasks = (below - first) * self.tasks_per_step
            self.tasks += tasks
            self._trusted.setdefault((stage, peer), first)
            chance = self.reputations.get(peer, Reputation()).chance(tasks)
            if drawn(self.secret, peer, stage, first, chance):
                checks.append(Check(stage, peer, verifier, first, below))
        self.open.update({check.stage: check for check in checks})
        return tuple(checks)

    def answered(self, check: Check, opinion: Opinion) -> CheckVerdict | None:
        """Take the answer to a check. Returns None for a check that is not open."""
        if self.open.get(check.stage) != check:
            return None
        accusation = self._accusations.pop(check.stage, None)
        outcome = outcome_of(opinion)
        if accusation is not None:
            del self.open[check.stage]
            return self._settled(accusation[0], accusation[1], outcome, opinion)
        if outcome == "accused" or (outcome == "disputed" and self.owner in opinion.inputs | opinion.links):
            # Against the owner's word the peer would go at once, on the verifier's alone.
            reason = opinion.own or DISPUTED
            again = Check(check.stage, check.peer, self.owner, check.first, check.below)
            self.open[check.stage] = again
            self._accusations[check.stage] = (check, reason)
            return CheckVerdict("accused", reason, again=again)
        del self.open[check.stage]
        match outcome:
            case "valid":
                self._hold_valid(check)
                return CheckVerdict("valid")
            case "disputed":
                return self._disputed(check, opinion)
            case "void":
                return CheckVerdict("void", opinion.void)

    def _hold_valid(self, check: Check) -> None:
        self.reputations[check.peer] = self.reputations.get(check.peer, Reputation()).held()
        self._trusted[check.stage, check.peer] = check.below
        self.checked_tasks += (check.below - check.first) * self.tasks_per_step

    def _settled(self, check: Check, contradiction: str, outcome: Outcome, opinion: Opinion) -> CheckVerdict:
        """Judge from the owner's own run what the verifier contradicted."""
        match outcome:
            case "accused":
                return self._guilty(check.peer, check, contradiction)
            case "valid":
                self._hold_valid(check)
                return self._guilty(check.verifier, check, "its word against another peer did not hold")
            case "disputed":
                return self._disputed(check, opinion)
            case "void":
                for peer in (check.peer, check.verifier):
                    self.reputations[peer] = self.reputations.get(peer, Reputation()).doubted()
                return CheckVerdict("void", f"{contradiction}; the job's own machine could not run it: {opinion.void}")

    def _disputed(self, check: Check, opinion: Opinion) -> CheckVerdict:
        """Handle a dispute between the peer and a neighbour about what they exchanged. The owner's own stages are
        trusted."""
        partners = sorted(opinion.inputs | opinion.links)
        if self.owner in partners:
            return self._guilty(check.peer, check, DISPUTED)
        again = [partner for partner in partners if partner in self._of(check.peer).partners]
        for partner in partners:
            self.reputations[check.peer] = self._of(check.peer).doubted(partner)
            self.reputations[partner] = self._of(partner).doubted(check.peer)
        for peer in (check.peer, *partners):
            if len(self._of(peer).partners) > 1:
                return self._guilty(peer, check, "its word stands against that of two others")
        if again:
            return self._guilty(check.peer, check, f"{DISPUTED}, for the second time")
        return CheckVerdict("disputed", DISPUTED, partners=tuple(partners))

    def _of(self, peer: str) -> Reputation:
        return self.reputations.get(peer, Reputation())

    def _guilty(self, peer: str, check: Check, reason: str) -> CheckVerdict:
        self.faulty_peers.add(peer)
        self.reputations.pop(peer, None)
        since = [step for (_, who), step in self._trusted.items() if who == peer]
        self.drop()
        return CheckVerdict("accused", reason, faulty_peer=peer, trusted=min(since, default=check.below))

    def drop(self) -> None:
        """Drop open checks, because a round began or a peer is expelled."""
        self.open.clear()
        self._accusations.clear()

    def went_back(self, step: int) -> None:
        """Steps from `step` on will be repeated, so their checks no longer count in a peer's favour."""
        self._trusted = {key: min(known, step) for key, known in self._trusted.items()}
