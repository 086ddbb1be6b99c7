"""Plan versions: minted one after the other, never twice, never changed."""

from __future__ import annotations

import pytest

from fusionai.coordination.broker.events import MemberPlacement, PlanMinted
from fusionai.coordination.broker.job import mint
from fusionai.primitives.errors import FusionError

FACT = PlanMinted(at_s=1.0, job="job-1", version=4, plan=b"plan", members=(MemberPlacement("p", (0,)),))


def test_the_next_version_is_minted_as_the_fact_says():
    plan = mint(FACT, newest=3)
    assert (plan.version, plan.job, plan.plan, plan.members) == (4, "job-1", b"plan", (MemberPlacement("p", (0,)),))


@pytest.mark.parametrize("newest", [0, 2, 4, 5])
def test_a_version_is_never_skipped_or_minted_again(newest: int):
    with pytest.raises(FusionError, match=f"expected plan version {newest + 1}"):
        mint(FACT, newest=newest)


def test_a_plan_version_is_immutable():
    with pytest.raises(AttributeError):
        mint(FACT, newest=3).plan = b"other"  # pyright: ignore[reportAttributeAccessIssue]
