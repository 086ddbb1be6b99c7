"""No figure stands without the white-box one, and an audit without a positive control says nothing."""

from __future__ import annotations

import msgspec
import pytest

from fusionai.privacy.findings import BoundaryFindings, Control
from harness.audited import boundary, findings, recovered


def test_a_learned_figure_can_not_stand_alone():
    with pytest.raises(TypeError, match="white_box"):
        BoundaryFindings(depth=0, defence="clean", loss=1.0, others=(recovered("inverter", 0.1),))  # pyright: ignore[reportCallIssue]
    with pytest.raises(ValueError, match="white-box"):
        BoundaryFindings(depth=0, defence="clean", loss=1.0, white_box=recovered("inverter", 0.1))
    with pytest.raises(ValueError, match="white-box"):
        boundary(0, "clean", 1.0, **{"white-box": 0.5})
    alone = msgspec.json.encode({"depth": 0, "defence": "clean", "loss": 1.0, "others": [recovered("ridge", 0.1)]})
    with pytest.raises(msgspec.ValidationError, match="white_box"):
        msgspec.json.decode(alone, type=BoundaryFindings)


def test_the_worst_attack_tells_a_boundary():
    assert boundary(1, "int4", 0.4, inverter=0.1, template=0.7).worst.attack == "template"
    assert boundary(1, "int4", 0.4, inverter=0.1).worst.attack == "white-box"


def test_an_audit_is_void_without_a_control_that_succeeded():
    assert not findings(boundary(0, "clean", 1.0)).void
    assert findings(boundary(0, "clean", 1.0), controls=()).void
    assert findings(boundary(0, "clean", 0.9), controls=(Control(name="clean", got=0.98),)).void


def test_boundaries_are_found_by_defence_and_depth():
    found = findings(boundary(2, "clean", 1.0), boundary(0, "clean", 1.0), boundary(2, "int4", 0.5))
    assert found.defences == ("clean", "int4")
    assert found.depths == (0, 2)
    assert found.at("int4", 2) is found.boundaries[2]
    assert found.at("int4", 0) is None
