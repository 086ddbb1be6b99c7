"""Whose work a served model's owner has checked, in words. Decides nothing.

Neighbours: `client.serve` says it before anything is loaded; `coordination.text_checks` checks.
"""

from __future__ import annotations

from fusionai.client.fault_story import stages_in_words
from fusionai.scheduling.types import Plan


def checking_sentence(plan: Plan, checkable: frozenset[int], *, spot: bool) -> str | None:
    """None where this machine computes everything itself. `checkable`: stages whose rows others see."""
    working = sorted(stage.stage for stage in plan.stages if stage.peer != plan.feed)
    if not working:
        return None
    if not spot:
        return "nobody checks what the machines compute (--checks off)"
    guarded = {guard.stage for guard in plan.guards if guard.peer != plan.feed}
    checked = [stage for stage in working if stage in guarded & checkable]
    hidden = [stage for stage in working if stage not in checkable]
    bare = [stage for stage in working if stage in checkable - guarded]
    parts: list[str] = []
    if checked:
        parts.append(f"spot checks: machines that stand by read part of the texts of {stages_in_words(checked)} again")
    if bare:
        parts.append(f"nobody checks {stages_in_words(bare)}: none stands by for {'it' if len(bare) == 1 else 'them'}")
    if hidden:
        parts.append(f"nobody checks {stages_in_words(hidden)}: what goes in or comes out is seen by no other stage")
    return "; ".join(parts)
