"""Hops of the certificate between many kinds of machines cost what their access links say, and none is to itself."""

from __future__ import annotations

from math import inf
from random import Random

import numpy as np
import pytest

from fusionai.scheduling.limits import Limits
from fusionai.scheduling.pipeline import Pipeline
from fusionai.scheduling.relaxation import Relaxation
from fusionai.scheduling.relaxation_kernels import Ground, crossed
from harness.judged_pools import judged_pool


@pytest.mark.parametrize("kind", ["unequal links", "equal", "latency"])
def test_a_hop_to_the_best_other_kind_is_that_of_all_pairs(kind: str) -> None:
    draw = Random(kind)
    problem = judged_pool(kind, 3, peers=90, layers=3)
    ground = Relaxation(Pipeline(problem, problem.peers), Limits(fewest=1, most=5))._ground
    kinds = len(ground.up)
    for _ in range(20):
        other_s = np.array([inf if draw.random() < 0.1 else draw.uniform(0, 2) for _ in range(kinds)])
        up_bytes, down_bytes = draw.uniform(0, 1e7), draw.uniform(0, 1e7)
        limit_s = draw.choice((inf, 1.0, 0.1))
        expected = [
            min(
                (
                    seconds
                    for other in range(kinds)
                    if (other != one or ground.room[one] > 1)
                    and (seconds := hop(ground, one, other, up_bytes, down_bytes, limit_s)) < inf
                    and (seconds := seconds + other_s[other]) < inf
                ),
                default=inf,
            )
            for one in range(kinds)
        ]
        assert crossed(ground, other_s, up_bytes, down_bytes, limit_s) == pytest.approx(expected, rel=1e-12)


def hop(ground: Ground, one: int, other: int, up_bytes: float, down_bytes: float, limit_s: float) -> float:
    there_s = max(up_bytes / ground.up[one], up_bytes / ground.down[other])
    back_s = max(down_bytes / ground.up[other], down_bytes / ground.down[one])
    if max(there_s, back_s) > limit_s:
        return inf
    return there_s + back_s + ground.latency_s[one] + ground.latency_s[other]
