"""Commands that the machines of training and serving jobs share."""

from __future__ import annotations

from dataclasses import dataclass

from fusionai.coordination.round.verification import Check, Outcome


@dataclass(frozen=True, slots=True)
class ReportCheck:
    """Report to the user the outcome of a check, with the reason."""

    check: Check
    outcome: Outcome
    reason: str


@dataclass(frozen=True, slots=True)
class Distrust:
    """Exclude this peer from all later plans of the job, because it gave wrong results. Nothing that it computed,
    probes included, is a reference for other peers any more."""

    peer: str
    reason: str
