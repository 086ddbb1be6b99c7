"""What happens to a pool while a job runs on it, and what recovering takes. Decides names, units and defaults.

Neighbours: `fates` draws what happens from it, `course` lets it happen; `cli.scenario_file` reads it from a file.
"""

from __future__ import annotations

from math import inf

import msgspec

from fusionai.coordination.silence import SHORTEST_S
from fusionai.scheduling.going_on import GRACE_S, Takeover
from fusionai.simulator.network import CALM, Weather


class Churn(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How providers come and go. All times are means of exponential distributions, drawn for each machine by itself."""

    stay_s: float = inf
    away_s: float = 1800.0
    """Until a machine that went is back, with nothing of what it had; also until one that is late comes at all."""
    crashes: float = 0.5
    """Part of the departures that are crashes; the others drain and leave in order."""
    silent: float = 0.25
    """Part of the crashes that close no connection: power or network gone."""
    freeze_every_s: float = inf
    freeze_s: float = 10.0
    """A frozen machine says and does nothing and keeps what it has."""
    late: float = 0.0
    """Part of the machines that are not there at the beginning."""


class Timings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is taken for granted about a recovery besides links and compute, which are the problem's."""

    notice_s: float = 0.05
    """From a closed connection to a driver that knows."""
    silence_s: float = SHORTEST_S
    """A silent peer counts as lost after so long."""
    plan_s: float = 0.2
    """For another plan, its tickets and its way to the driver's disk."""
    journal_s: float = 0.005
    """For a commit to be on the driver's disk."""
    grace_s: float = GRACE_S
    """How long a machine of the same numerics is waited for before the job goes on otherwise."""
    patience_s: float = 600.0
    """How long whoever wants to leave in order waits for somebody to take over."""


class Scenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Hours of one training job."""

    hours: float = 1.0
    seed: int = 1
    checkpoint_every: int = 100
    """Steps; 0: only the beginning can be gone back to."""
    takeover: Takeover = "any"
    """Who may go on in a lost machine's place."""
    churn: Churn = Churn()
    timings: Timings = Timings()
    weather: Weather = CALM
