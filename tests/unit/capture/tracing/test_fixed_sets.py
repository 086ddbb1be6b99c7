"""A model that goes through sets of texts has the same graph at each start of its owner."""

from __future__ import annotations

import os
import subprocess
import sys
from types import ModuleType

import pytest
import torch
from torch import nn

from fusionai.capture.tracing.fixed_sets import FixedSet, fixed_sets

KINDS = [f"kind-{number}" for number in range(50)]
PROGRAM = """
from harness.zoo import models
from fusionai.capture.capture import capture
from fusionai.ir.schema import content_hash
for model in models():
    if model.name in ("gemma3_text", "modernbert"):
        print(content_hash(capture(model.source, task=model.task, sequence=(1, model.positions)).graph))
"""


def test_texts_come_in_order_and_all_else_works_as_in_a_set():
    found = FixedSet(KINDS)
    assert list(found) == sorted(KINDS)
    assert list(found - {"kind-1"}) == sorted(set(KINDS) - {"kind-1"})
    assert list(found & FixedSet(KINDS[:7])) == sorted(KINDS[:7])
    assert list(found | {"a"}) == ["a", *sorted(KINDS)]
    assert found == set(KINDS)
    assert isinstance(found, set)
    assert isinstance(set(KINDS), FixedSet), "code that asks for a set means every set"
    assert set(FixedSet([2, "a", None])) == {2, "a", None}


class Sums(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kinds = set(KINDS)

    def forward(self) -> list[str]:
        return [*set(KINDS), *self.kinds]


def test_the_code_and_the_parts_of_a_module_have_them_only_meanwhile():
    module = nn.Sequential(Sums())
    own = sys.modules[__name__]
    with fixed_sets(module):
        assert module[0]() == [*sorted(KINDS), *sorted(KINDS)]
        assert isinstance(own, ModuleType)
        assert vars(own)["set"] is FixedSet
        assert vars(torch).get("set") is None
    assert "set" not in vars(own)
    assert type(module[0].kinds) is set


@pytest.mark.slow
def test_the_graph_does_not_depend_on_pythons_order_of_texts():
    """By processes with other seeds of Python's hash, of which about half had another order."""
    made: list[str] = []
    for seed in ("1", "2", "3"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True
        )
        made.append(done.stdout)
    assert len(made[0].split()) == 2
    assert made == [made[0]] * 3
