"""What the driver of a training job remembers between spot checks and their consequences."""

from __future__ import annotations

from dataclasses import dataclass

from fusionai.coordination.round.verification import CheckVerdict


@dataclass(slots=True)
class Verifying:
    sentence: CheckVerdict | None = None
    """Verdict against a peer that is expelled as soon as no commit is being journalled."""
    checkable: int = 0
    """First step from which work can be checked. Retained data of earlier steps may have been lost with the last
    round."""
    voided: bool = False
    """Whether steps were taken back. What runs again on the way to the present step is then not compared with the first
    run."""
