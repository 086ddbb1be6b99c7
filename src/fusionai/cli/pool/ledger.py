"""Shows and exports the pool's ledger for `fusion pool --ledger`, and checks an export.

The broker signs the ledger (`broker.lent`); an export in JSON carries that statement, so that it can be checked later
and without the broker."""

from __future__ import annotations

import base64
import binascii
import csv
import io
from collections import defaultdict
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec

from fusionai.cli import console
from fusionai.cli.options import write_json
from fusionai.cli.pool.session import in_pool
from fusionai.client.pool.session import any_membership
from fusionai.primitives.errors import TrustError, UsageError
from fusionai.primitives.ids import PeerId, short
from fusionai.primitives.units import format_bytes, format_count, format_flop
from fusionai.storage.atomic import write_atomic
from fusionai.transport.security.ledger import LedgerContent, LedgerEntry, LedgerMachine, verify_ledger

_SUMS: Final = ("lent_s", "steps", "tokens", "flops", "struck_steps", "struck_tokens", "struck_flops")
_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r")
"""Beginnings of cells that spreadsheets run."""


class _Export(msgspec.Struct, frozen=True):
    """What is read of an export; the rest repeats what the signed statement has."""

    signed: str


def show_ledger(home: Path, csv_file: Path | None, json_file: Path | None) -> None:
    """Ask the broker for the ledger, print it, and write it to the files. Raises `TrustError` if the pool's authority
    has not signed it."""
    signed = in_pool(home, lambda session: session.ledger())
    ledger = verify_ledger(signed, any_membership(home).credentials.authority_key)
    if json_file is not None:
        write_json(json_file, "ledger", {**_figures(ledger), "signed": base64.b64encode(signed).decode()})
    if csv_file is not None:
        write_atomic(csv_file, _csv(ledger).encode())
    _show(ledger)


def check_ledger(home: Path, exported: Path) -> None:
    """Print an export if the authority of this machine's pool has signed it. Raises `UsageError`, `TrustError`."""
    try:
        content = exported.read_bytes()
        signed = base64.b64decode(msgspec.json.decode(content, type=_Export).signed, validate=True)
    except OSError as error:
        raise UsageError(f"{exported}: can't be read ({error.strerror}).") from None
    except (msgspec.DecodeError, UnicodeDecodeError, binascii.Error) as error:
        raise UsageError(
            f"{exported}: expected a ledger written by `fusion pool --ledger --json FILE` ({error})."
        ) from None
    ledger = verify_ledger(signed, any_membership(home).credentials.authority_key)
    shown = msgspec.json.decode(msgspec.json.encode(_figures(ledger)))
    changed = [key for key, value in msgspec.json.decode(content).items() if key in shown and value != shown[key]]
    if changed:
        raise TrustError(f"{exported}: {', '.join(changed)} differ from what the pool's authority signed.")
    _show(ledger)
    console.line("Signed by this pool's authority.")


def _figures(ledger: LedgerContent) -> dict[str, object]:
    return {
        "pool": ledger.pool,
        "at_s": ledger.at_s,
        "machines": [msgspec.structs.asdict(one) for one in ledger.machines],
        "entries": [msgspec.structs.asdict(one) for one in ledger.entries],
    }


def _csv(ledger: LedgerContent) -> str:
    """Return a row for each machine and owner, and one for each machine that has relayed."""
    machines = {one.machine: one for one in ledger.machines}
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(("machine", "name", "person", "owner", "owner_name", "owner_person", *_SUMS, "relayed_bytes"))
    for entry in ledger.entries:
        sums = [getattr(entry, name) for name in _SUMS]
        writer.writerow((*_party(machines[entry.machine]), *_party(machines[entry.owner]), *sums, 0))
    for one in ledger.machines:
        if one.relayed_bytes:
            writer.writerow((*_party(one), "", "", "", *(0 for _ in _SUMS), one.relayed_bytes))
    return text.getvalue()


def _party(machine: LedgerMachine) -> tuple[str, str, str]:
    return machine.machine, _cell(machine.name), _cell(machine.person)


def _cell(text: str) -> str:
    """Names are chosen by others: none may be a formula."""
    return f"'{text}" if text.startswith(_FORMULA) else text


def _show(ledger: LedgerContent) -> None:
    when = datetime.fromtimestamp(ledger.at_s, UTC).astimezone().strftime("%Y-%m-%d %H:%M")
    if not ledger.machines:
        console.line(f"Pool {console.printable(ledger.pool)} has lent nothing yet.")
        return
    machines = {one.machine: one for one in ledger.machines}
    people = {one.machine: one.person or one.machine for one in ledger.machines}
    _table(
        ledger,
        f"Lent by machines of pool {console.printable(ledger.pool)}, {when}",
        "machine",
        lambda machine: machine,
        lambda machine: machines[machine].name or short(PeerId(machine)),
        people,
    )
    if any(one.person for one in ledger.machines):
        console.line()
        _table(
            ledger,
            "Lent by persons, as the broker's policy names them",
            "person",
            people.__getitem__,
            lambda person: machines[person].name or short(PeerId(person)) if person in machines else person,
            people,
        )
    console.line(
        "Hours: for which jobs had the machine. FLOP: operations of committed, undisputed work, as the jobs' owners "
        "report it. Struck: counted before, and no more."
    )


def _table(
    ledger: LedgerContent,
    title: str,
    header: str,
    group_of: Callable[[str], str],
    label: Callable[[str], str],
    people: dict[str, str],
) -> None:
    entries: dict[str, list[LedgerEntry]] = defaultdict(list)
    relayed: dict[str, int] = defaultdict(int)
    for entry in ledger.entries:
        entries[group_of(entry.machine)].append(entry)
    for one in ledger.machines:
        if one.relayed_bytes:
            relayed[group_of(one.machine)] += one.relayed_bytes
    rows = [
        (label(group), *_cells(entries[group], people), *([format_bytes(relayed[group])] if relayed else []))
        for group in dict.fromkeys((*entries, *relayed))
    ]
    columns = (header, "hours", "steps", "tokens", "FLOP", "for others", "struck")
    console.table(
        (*columns, "relayed") if relayed else columns,
        rows,
        title=title,
        right=tuple(range(1, len(columns) + bool(relayed))),
        spare=("relayed", "steps"),
    )


def _cells(entries: Iterable[LedgerEntry], people: dict[str, str]) -> tuple[str, ...]:
    found = tuple(entries)
    others = (one for one in found if people[one.machine] != people[one.owner])
    return (
        _hours(sum(one.lent_s for one in found)),
        format_count(sum(one.steps for one in found)),
        format_count(sum(one.tokens for one in found)),
        format_flop(sum(one.flops for one in found)),
        format_flop(sum(one.flops for one in others)),
        format_flop(sum(one.struck_flops for one in found)),
    )


def _hours(seconds: float) -> str:
    hours = seconds / 3600
    return f"{hours:.3g}" if hours < 100 else f"{hours:,.0f}"
