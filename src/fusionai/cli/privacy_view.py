"""How a job's privacy level reads: what stays with its owner, and what that costs the owner's machine. Decides words.

Neighbours: `primitives.privacy` has the levels, `scheduling.ends` counts; `cli.plan`, `cli.watch` and `cli.serve` show.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from fusionai.primitives.privacy import STAYS, PrivacyLevel, keeps_ends
from fusionai.primitives.units import format_bytes, format_seconds
from fusionai.scheduling.ends import owners_part
from fusionai.scheduling.types import Plan


def privacy_lines(level: PrivacyLevel, plan: Plan) -> Iterator[str]:
    """The level, and its price where it has one."""
    yield f"Privacy {level}: {STAYS[level]}"
    part = owners_part(plan)
    if not keeps_ends(level) or part is None:
        return
    blocks = " and ".join(
        str(first) if end - first == 1 else f"{first} to {end - 1}" for first, end in dict.fromkeys(part.blocks)
    )
    each = "token" if plan.task == "serve" else "step"
    yield (
        f"That costs this machine {format_bytes(part.memory_bytes)} of {format_bytes(part.limit_bytes)} memory and "
        f"{format_seconds(part.compute_s)} a {each} (blocks {blocks})."
    )


def privacy_figures(level: PrivacyLevel, plan: Plan) -> dict[str, object]:
    """For `--json`. `owner`: what the job owner's machine gives for its blocks; None where it has none."""
    part = owners_part(plan)
    return {"level": level, "owner": None if part is None else msgspec.structs.asdict(part)}
