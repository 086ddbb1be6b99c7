"""Which modules the type checker looks at after a change."""

from __future__ import annotations

import pytest

from harness import type_check
from harness.type_check import concerned, digests, files_to_check


@pytest.mark.slow
def test_after_a_change_the_module_and_those_that_import_it_are_checked():
    found = concerned({"fusionai.transport.interface"})
    assert {"fusionai.transport.interface", "fusionai.transport.channels.framed", "fusionai.execution.host"} <= found
    assert "fusionai.primitives.errors" not in found


def test_a_name_that_is_handed_on_leads_to_those_that_import_it_from_there():
    found = concerned({"fusionai.wire.training"})
    assert {"fusionai.wire.messages", "fusionai.execution.training.member"} <= found
    assert "fusionai.broker.server" not in found


def test_a_removed_module_leads_to_those_that_still_import_it():
    now = digests()
    before = {**now, "src/fusionai/wire/frame_of_old.py": "0"}
    assert files_to_check(before, now) == []
    changed = {path: digest for path, digest in now.items() if path != "src/fusionai/wire/frame.py"}
    assert "src/fusionai/transport/channels/framed.py" in (files_to_check(now, changed) or [])


@pytest.mark.parametrize("name", type_check.SETTINGS)
def test_after_a_change_of_the_settings_everything_is_checked(name: str):
    now = digests()
    assert files_to_check(now, now) == []
    assert files_to_check({**now, name: "0"}, now) is None
    assert files_to_check({}, now) is None


def test_what_failed_is_checked_again(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(type_check, "PASSED", tmp_path / "passed.json")
    assert type_check.main("false") == 1
    assert not type_check.PASSED.exists()
    assert type_check.main("true") == 0
    assert type_check.main("false", "--changed") == 0, "nothing has changed"
    assert type_check.main("false") == 1, "the whole source, whatever was kept"
