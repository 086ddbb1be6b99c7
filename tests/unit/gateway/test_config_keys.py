"""Keys: which lines of the file count, whose a key is, that scopes are apart and tell nothing."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from fusionai.gateway.config import KeyRing
from fusionai.primitives.errors import UsageError

LONG = "a-key-of-enough-letters"


def ring(tmp_path: Path, content: str) -> KeyRing:
    file = tmp_path / "keys"
    file.write_text(content, encoding="utf-8")
    return KeyRing.load(file)


def test_a_key_is_known_plain_or_by_its_digest(tmp_path: Path):
    digest = hashlib.sha256(b"another-long-enough-key").hexdigest()
    keys = ring(tmp_path, f"# ours\n\nalice = {LONG}\nbob = sha256:{digest}\n")
    alice, bob = keys.holder(LONG), keys.holder("another-long-enough-key")
    assert alice is not None
    assert bob is not None
    assert (alice.name, bob.name) == ("alice", "bob")
    assert alice.scope != bob.scope
    assert hashlib.sha256(LONG.encode()).hexdigest() not in alice.scope


@pytest.mark.parametrize("shown", ["", "x", LONG + "x", LONG[:-1], "\udce9" * 20])
def test_nothing_else_is_known(tmp_path: Path, shown: str):
    assert ring(tmp_path, LONG).holder(shown) is None


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "no API key"),
        ("# only this\n", "no API key"),
        ("short\n", "5 characters"),
        (f"{LONG}\n{LONG} {LONG}\n", ":2: expected"),
    ],
)
def test_a_wrong_file_is_refused_with_its_line(tmp_path: Path, content: str, said: str):
    with pytest.raises(UsageError, match=said):
        ring(tmp_path, content)


def test_a_missing_file_is_refused(tmp_path: Path):
    with pytest.raises(UsageError, match="can't be read"):
        KeyRing.load(tmp_path / "none")
