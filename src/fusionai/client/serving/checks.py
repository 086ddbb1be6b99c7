"""Describes which stages of a served model are spot-checked. `coordination.serving.checks` does the checks."""

from __future__ import annotations

from fusionai.client.pool.fault_report import stages_in_words
from fusionai.scheduling.problem.types import Plan


def checking_sentence(plan: Plan, checkable: frozenset[int], *, spot: bool) -> str | None:
    """Return a sentence about the checks, None if this machine computes everything. `checkable`: stages whose inputs
    and outputs other stages see."""
    working = sorted(stage.stage for stage in plan.stages if stage.peer != plan.feed)
    if not working:
        return None
    if not spot:
        return "the peers' results are not checked (--checks off)"
    guarded = {guard.stage for guard in plan.guards if guard.peer != plan.feed}
    checked = [stage for stage in working if stage in guarded & checkable]
    hidden = [stage for stage in working if stage not in checkable]
    bare = [stage for stage in working if stage in checkable - guarded]
    parts: list[str] = []
    if checked:
        parts.append(f"spot checks: warm standbys recompute part of the texts of {stages_in_words(checked)}")
    if bare:
        parts.append(f"not checked: {stages_in_words(bare)}, which {'has' if len(bare) == 1 else 'have'} no standby")
    if hidden:
        parts.append(f"not checked: {stages_in_words(hidden)}, whose inputs or outputs no other stage sees")
    return "; ".join(parts)
