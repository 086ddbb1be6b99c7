"""How the ledger reads and is exported: tables by machine and person, CSV that no spreadsheet runs, checked exports."""

from __future__ import annotations

import base64
import csv
import io
import json
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fusionai.cli.pool import ledger
from fusionai.primitives.errors import TrustError, UsageError
from fusionai.transport.security.identity import public_bytes
from fusionai.transport.security.ledger import LedgerContent, LedgerEntry, LedgerMachine, sign_ledger

KEY = Ed25519PrivateKey.from_private_bytes(bytes(32))
A, B, C = "a" * 52, "b" * 52, "c" * 52
LENT = LedgerContent(
    1,
    "friends",
    0.0,
    (LedgerMachine(A, "attic", "Ada"), LedgerMachine(B, "=1+1", "Ada"), LedgerMachine(C, "", "", 5_000_000)),
    (
        LedgerEntry(A, B, 7200.0, 10, 2000, 3e12, 0, 0, 0.0),
        LedgerEntry(A, C, 1800.0, 5, 1000, 1.5e18, 1, 200, 3e15),
        LedgerEntry(C, A, 3.6e6, 0, 70, 1e9, 0, 0, 0.0),
    ),
)


class _Membership:
    """What is read of one."""

    credentials = type("Credentials", (), {"authority_key": public_bytes(KEY.public_key())})


@pytest.fixture(autouse=True)
def _member(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "any_membership", lambda _home: _Membership())
    monkeypatch.setattr(ledger, "in_pool", lambda _home, _ask: sign_ledger(LENT, KEY))


def test_sums_by_machine_and_by_person(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    ledger.show_ledger(tmp_path, None, None)
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split("  ") for line in lines if line]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    assert ["attic", "2.5", "15", "3k", "1.5 E", "1.5 E", "3 P", "0 B"] in cells
    assert ["cccccccc", "1,000", "0", "70", "1 G", "1 G", "0", "5 MB"] in cells
    assert ["Ada", "2.5", "15", "3k", "1.5 E", "1.5 E", "3 P", "0 B"] in cells
    assert max(map(len, lines[:-1])) <= 80


def test_machines_of_one_person_lend_each_other_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    content = LedgerContent(1, "friends", 0.0, LENT.machines, LENT.entries[:1])
    ledger._show(content)
    assert "3 T           0" in capsys.readouterr().out


def test_an_empty_ledger_says_so(capsys: pytest.CaptureFixture[str]):
    ledger._show(LedgerContent(1, "friends", 0.0, (), ()))
    assert capsys.readouterr().out == "Pool friends has lent nothing yet.\n"


def test_csv_has_a_row_per_machine_and_owner_and_no_formula(tmp_path: Path):
    ledger.show_ledger(tmp_path, tmp_path / "l.csv", None)
    rows = list(csv.DictReader(io.StringIO((tmp_path / "l.csv").read_text())))
    assert [(row["machine"], row["owner"], row["flops"]) for row in rows[:2]] == [
        (A, B, "3000000000000.0"),
        (A, C, "1.5e+18"),
    ]
    assert rows[0]["owner_name"] == "'=1+1"
    assert (rows[-1]["machine"], rows[-1]["owner"], rows[-1]["relayed_bytes"]) == (C, "", "5000000")


def test_an_export_is_checked_without_the_broker(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    exported = tmp_path / "l.json"
    ledger.show_ledger(tmp_path, None, exported)
    ledger.check_ledger(tmp_path, exported)
    assert "Signed by this pool's authority." in capsys.readouterr().out
    content = json.loads(exported.read_text())
    for key, value in (("pool", "foes"), ("entries", content["entries"][:1])):
        (tmp_path / "changed.json").write_text(json.dumps({**content, key: value}))
        with pytest.raises(TrustError, match=f"{key} differ from what"):
            ledger.check_ledger(tmp_path, tmp_path / "changed.json")


def test_a_ledger_that_another_pool_has_signed_is_refused(tmp_path: Path):
    exported = tmp_path / "l.json"
    other = sign_ledger(LENT, Ed25519PrivateKey.generate())
    exported.write_text(json.dumps({"signed": base64.b64encode(other).decode()}))
    with pytest.raises(TrustError, match="expected a ledger signed by this pool's authority"):
        ledger.check_ledger(tmp_path, exported)


@pytest.mark.parametrize("content", ["", "{}", '{"signed": "?"}', "[1]"])
def test_a_file_that_is_no_export_is_refused(content: str, tmp_path: Path):
    exported = tmp_path / "l.json"
    exported.write_text(content)
    with pytest.raises(UsageError, match=r"expected a ledger written by `fusion pool --ledger --json FILE`"):
        ledger.check_ledger(tmp_path, exported)
    with pytest.raises(UsageError, match="can't be read"):
        ledger.check_ledger(tmp_path, tmp_path / "none.json")
