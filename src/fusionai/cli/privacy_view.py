"""Describes a job's privacy level: what stays with the job owner, and what that costs the owner's machine.

`primitives.privacy` defines the levels, `scheduling.problem.embedding_and_head` computes the cost; `cli.plan`,
`cli.watch` and `cli.serve` print the result."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from fusionai.primitives.privacy import STAYS, PrivacyLevel, keeps_ends
from fusionai.primitives.units import format_bytes, format_seconds
from fusionai.scheduling.problem.embedding_and_head import owners_part
from fusionai.scheduling.problem.types import Plan


def privacy_lines(level: PrivacyLevel, plan: Plan) -> Iterator[str]:
    """Yield a sentence about the level and, if it keeps blocks with the owner, one about their cost."""
    yield f"Privacy {level}: {STAYS[level]}"
    part = owners_part(plan)
    if not keeps_ends(level) or part is None:
        return
    blocks = " and ".join(
        str(first) if end - first == 1 else f"{first} to {end - 1}" for first, end in dict.fromkeys(part.blocks)
    )
    each = "token" if plan.task == "serve" else "step"
    yield (
        f"This level costs this machine {format_bytes(part.memory_bytes)} of {format_bytes(part.limit_bytes)} memory "
        f"and {format_seconds(part.compute_s)} per {each} (blocks {blocks})."
    )


def privacy_figures(level: PrivacyLevel, plan: Plan) -> dict[str, object]:
    """Return the figures for `--json`. `owner`: cost of the blocks on the job owner's machine, None without any."""
    part = owners_part(plan)
    return {"level": level, "owner": None if part is None else msgspec.structs.asdict(part)}
