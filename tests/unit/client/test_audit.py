"""What an audit is made of: depths that leave home, codecs as peers use them; a small one from beginning to end."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fusionai.client import audit
from fusionai.client.audit import AuditOptions, audited, check_model, through
from fusionai.primitives.errors import ModelError, UsageError
from fusionai.privacy.subject import SmallModel


def test_codecs_lose_what_they_lose_on_links():
    boundary = np.random.default_rng(1).normal(size=(2, 8, 64)).astype(np.float32)
    error = {codec: np.abs(through(codec)(boundary) - boundary).mean() for codec in ("int8", "int4")}
    assert 0 < error["int8"] < 0.02 < error["int4"] < 0.3


@pytest.mark.parametrize(
    ("options", "depths"),
    [
        (AuditOptions(), (0, 1, 2, 3, 4)),
        (AuditOptions(level="split"), (0, 1, 2, 3, 4)),
        (AuditOptions(level="split-k", first=2, last=1), (2, 3)),
        (AuditOptions(depths=(4, 0, 4)), (0, 4)),
    ],
)
def test_depths_are_those_that_leave_home(options: AuditOptions, depths: tuple[int, ...]):
    assert audit._depths(options, 4) == depths


@pytest.mark.parametrize(
    "options",
    [
        AuditOptions(depths=(5,)),
        AuditOptions(level="split-k", first=1, last=0, depths=(0,)),
        AuditOptions(level="split-k", first=3, last=2),
    ],
)
def test_a_depth_that_nobody_sees_is_refused(options: AuditOptions):
    with pytest.raises(UsageError, match="peers"):
        audit._depths(options, 4)


def test_a_directory_without_a_model_is_refused(tmp_path: Path):
    with pytest.raises(ModelError, match=r"config\.json"):
        check_model(tmp_path)


@pytest.mark.slow
def test_a_small_audit_from_beginning_to_end(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(audit, "CORPUS_BYTES", 200_000)
    options = AuditOptions(
        small=SmallModel(layers=2, width=32, steps=2, rows=2),
        level="split-k",
        first=1,
        last=0,
        depths=(1,),
        texts=2,
        private_tokens=24,
        secret_steps=2,
    )
    found = audited(options, lambda _: None)
    assert not found.void
    assert found.defences[-2:] == ("secret prefix, tuned", "secret prefix, fresh")
    assert found.at("clean", 1) is not None
    assert found.trial.private_tokens == 24
