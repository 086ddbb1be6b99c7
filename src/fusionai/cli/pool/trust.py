"""`fusion trust`: edits this machine's trust list: trusted signing keys, endorsed machines, revoked machines.

Only files of this machine change. An endorsement is passed on as a printed line, which is not secret. Keys are given in
full, because names come from the broker, and the trust list must not depend on the broker. `transport.security.trust`
stores the file, `transport.security.trust` signs."""

from __future__ import annotations

import secrets
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import click
import msgspec

from fusionai.cli import console
from fusionai.cli.options import home_option, json_option, number_option, write_json
from fusionai.primitives.errors import TrustError, UsageError
from fusionai.primitives.ids import PEER_ID_LENGTH, PeerId, short
from fusionai.transport.security.identity import KEY_FILE, load_identity, public_bytes, public_key_of
from fusionai.transport.security.trust import (
    TRUST_FILE,
    Endorsement,
    Revoked,
    Signer,
    TrustList,
    carry,
    endorse,
    format_endorsement,
    key_text,
    load_trust_list,
    parse_endorsement,
    parse_key,
    read_endorsement,
    save_trust_list,
    signing_key,
    verify_endorsement,
)

OWN_NAME: Final = "this machine"
DAY_S: Final = 86_400
DAYS: Final = 365


@click.group()
def trust() -> None:
    """Choose which machines this machine's jobs of privacy level `trusted` may use. Such jobs run only on members whose
    keys are endorsed by a signing key trusted here. The broker passes endorsements on but can't make any."""


@trust.command()
@home_option
@json_option
def key(home: Path, json_file: Path | None) -> None:
    """Show this machine's signing key, which endorses machines, and its own key, which others endorse. If there is no
    signing key yet, one is created and trusted here."""
    signer = _own_key(home)
    lends = load_identity(home).peer if (home / KEY_FILE).is_file() else None
    write_json(json_file, "trust", {"signing_key": signer, "peer": lends})
    console.line(f"signing key (for `fusion trust add` on other machines): {signer}")
    if lends is not None:
        console.line(f"this machine's key (for `fusion trust sign` on other machines): {lends}")


@trust.command()
@click.argument("signing_key", metavar="SIGNING_KEY")
@click.option("--name", default="", metavar="NAME", help="Show this name for the key in lists on this machine.")
@home_option
def add(signing_key: str, name: str, home: Path) -> None:
    """Trust SIGNING_KEY: members that it endorses may run this machine's `trusted` jobs."""
    text = key_text(parse_key(signing_key))
    trust_list = _trust_list(home)
    others = tuple(one for one in trust_list.signers if one.key != text)
    _keep(home, msgspec.structs.replace(trust_list, signers=(*others, Signer(text, name[:64]))))
    console.line(f"Trusted here: {text}{f' ({name})' if name else ''}.")


@trust.command()
@click.argument("signing_key", metavar="SIGNING_KEY")
@home_option
def remove(signing_key: str, home: Path) -> None:
    """Stop trusting SIGNING_KEY: its endorsements no longer count here, with immediate effect."""
    text = key_text(parse_key(signing_key))
    trust_list = _trust_list(home)
    rest = tuple(one for one in trust_list.signers if one.key != text)
    if len(rest) == len(trust_list.signers):
        raise UsageError(f"{text} is not trusted here.", hint="`fusion trust list` shows the trusted keys.")
    _keep(home, msgspec.structs.replace(trust_list, signers=rest))
    console.line(f"No longer trusted: {text}.")


@trust.command()
@click.argument("peer", metavar="PEER")
@click.option("--name", default="", metavar="NAME", help="Show this name for the machine, e.g. its owner's.")
@number_option("--days", "Let the endorsement be valid for N days.", DAYS, 1, 3650)
@home_option
@json_option
def sign(peer: str, name: str, days: int, home: Path, json_file: Path | None) -> None:
    """Endorse the machine whose key is PEER, with this machine's signing key. The endorsement counts here at once. Run
    the printed `fusion trust carry` command on the endorsed machine, so that it also counts for others who trust this
    signing key."""
    member = _peer(peer)
    signer, data = endorsed(home, member, name, days)
    write_json(json_file, "trust", {"peer": member, "signing_key": signer, "endorsement": format_endorsement(data)})
    console.line(
        f"Endorsed for {days} days: {member}{f' ({name})' if name else ''}. To show it to others, run on that machine:"
    )
    console.line(f"  fusion trust carry {format_endorsement(data)}")


def endorsed(home: Path, member: PeerId, name: str, days: int = DAYS) -> tuple[str, bytes]:
    """Endorse a machine in this machine's trust list; return the signing key as text and the endorsement. Raises
    `UsageError` for a machine that is revoked there."""
    signer = _own_key(home)
    trust_list = _trust_list(home)
    if any(one.peer == member for one in trust_list.revoked):
        raise UsageError(f"{short(member)} is revoked here.", hint=f"Run `fusion trust revoke --undo {member}` first.")
    private = signing_key(home, make=False)
    if private is None:
        raise UsageError(f"the signing key {signer} has disappeared from {home}.", hint="Run the command again.")
    data = endorse(
        private,
        member,
        name=name,
        now_wall_s=time.time(),
        lifetime_s=days * DAY_S,
        serial=secrets.token_bytes(16),
    )
    _keep(home, msgspec.structs.replace(trust_list, endorsements=(data, *trust_list.endorsements)))
    return signer, data


@trust.command("carry")
@click.argument("line", metavar="ENDORSEMENT")
@home_option
def carry_line(line: str, home: Path) -> None:
    """Show the pool ENDORSEMENT, which `fusion trust sign` printed on another machine for this machine's key. A running
    `fusion join` shows it within seconds."""
    if not (home / KEY_FILE).is_file():
        raise UsageError(f"this machine has no key yet (there is no {home / KEY_FILE}).", hint="Join a pool first.")
    data = parse_endorsement(line)
    carry(home, data, load_identity(home).peer)
    statement = read_endorsement(data)
    console.line(f"Carried until {_date(statement.not_after_s)}: the endorsement by {key_text(statement.signer)}.")


@trust.command()
@click.argument("peer", metavar="PEER")
@click.option("--undo", is_flag=True, help="Cancel a revocation.")
@home_option
def revoke(peer: str, undo: bool, home: Path) -> None:
    """Exclude PEER from this machine's `trusted` jobs, regardless of endorsements. Running jobs exclude it within
    seconds. Other machines that trust PEER must revoke it themselves."""
    member = _peer(peer)
    trust_list = _trust_list(home)
    rest = tuple(one for one in trust_list.revoked if one.peer != member)
    if undo:
        if len(rest) == len(trust_list.revoked):
            raise UsageError(
                f"{short(member)} is not revoked here.", hint="`fusion trust list` shows the revoked machines."
            )
        _keep(home, msgspec.structs.replace(trust_list, revoked=rest))
        console.line(f"No longer revoked: {member}; its valid endorsements count again.")
        return
    _keep(home, msgspec.structs.replace(trust_list, revoked=(*rest, Revoked(member, int(time.time())))))
    console.line(f"Revoked: {member}.")


@trust.command("list")
@home_option
@json_option
def show(home: Path, json_file: Path | None) -> None:
    """List the trusted signing keys, the endorsements known here, and the revoked machines."""
    trust_list = _trust_list(home)
    rows = [_row(trust_list, data) for data in trust_list.endorsements]
    write_json(
        json_file,
        "trust",
        {
            "signing_keys": [{"key": one.key, "name": one.name} for one in trust_list.signers],
            "endorsements": [{"peer": peer, "name": name, "by": by, "state": state} for peer, name, by, state in rows],
            "revoked": [{"peer": one.peer, "at_s": one.at_s} for one in trust_list.revoked],
        },
    )
    if not trust_list.signers:
        console.line("No signing key is trusted here, so `trusted` jobs find no peers. Start with `fusion trust key`.")
    for one in trust_list.signers:
        console.line(f"trusted to sign: {one.key}{f' ({console.printable(one.name)})' if one.name else ''}")
    if rows:
        console.table(("peer", "name", "endorsed by", "state"), rows)
    for gone in trust_list.revoked:
        console.line(f"revoked since {_date(gone.at_s)}: {gone.peer}")


def _row(trust_list: TrustList, data: bytes) -> tuple[str, str, str, str]:
    statement = read_endorsement(data)
    return (
        statement.peer,
        console.printable(statement.name),
        console.printable(trust_list.name_of(statement.signer)),
        _state(trust_list, data, statement),
    )


def _state(trust_list: TrustList, data: bytes, statement: Endorsement) -> str:
    if any(one.peer == statement.peer for one in trust_list.revoked):
        return "revoked"
    try:
        verify_endorsement(data, trust_list.keys, peer=PeerId(statement.peer), now_wall_s=time.time())
    except TrustError as error:
        return error.message
    return f"valid until {_date(statement.not_after_s)}"


def _own_key(home: Path) -> str:
    """Return the signing key as text. If there is none, create one and trust it here."""
    known = signing_key(home, make=False)
    private = known or signing_key(home, make=True)
    if private is None:
        raise UsageError(f"no signing key could be created in {home}.")
    text = key_text(public_bytes(private.public_key()))
    if known is None:
        trust_list = _trust_list(home)
        _keep(home, msgspec.structs.replace(trust_list, signers=(*trust_list.signers, Signer(text, OWN_NAME))))
    return text


def _trust_list(home: Path) -> TrustList:
    """Return the trust list of `home`, or an empty one. Raises if the file can't be read, so that it is kept."""
    path = home / TRUST_FILE
    return load_trust_list(path) if path.exists() else TrustList()


def _keep(home: Path, trust_list: TrustList) -> None:
    save_trust_list(home / TRUST_FILE, trust_list)


def _peer(text: str) -> PeerId:
    try:
        public_key_of(text)
    except TrustError as error:
        raise UsageError(
            f"expected a machine's full key of {PEER_ID_LENGTH} characters, got {text[:80]!r}.",
            hint="`fusion trust key` on that machine prints it. Get it from its owner, not from the broker.",
        ) from error
    return PeerId(text)


def _date(wall_s: int) -> str:
    return datetime.fromtimestamp(wall_s, UTC).strftime("%Y-%m-%d")
