"""Invitations: they survive, and every slip of copying is a sentence, never a trace."""

from __future__ import annotations

import base64
import hashlib

import msgspec
import pytest

from fusionai.primitives.errors import UsageError
from fusionai.transport.enrolment import PREFIX, InvitationContent, format_invitation, parse_invitation

INVITATION = InvitationContent(
    "friends", ("tcp://192.168.1.7:4711", "tcp://[::1]:4711"), bytes(range(32)), bytes(range(16))
)


def spell(content: object) -> str:
    data = msgspec.msgpack.encode(content)
    return PREFIX + base64.urlsafe_b64encode(data + hashlib.sha256(data).digest()[:4]).decode().rstrip("=")


def test_an_invitation_survives():
    text = format_invitation(INVITATION)
    assert text.startswith("fusion1-")
    assert parse_invitation(text) == INVITATION
    assert parse_invitation(f"  {text}\n") == INVITATION
    assert not set(text) & set(" /+=\"'$")


@pytest.mark.parametrize(
    "pasted",
    [
        "fusion join {}",
        "$ fusion join '{}'",
        'Please run "fusion join {}" on your machine, then tell me.',
        "  fusion join {}\n\nPress Ctrl-C to close the pool.\n",
        "`{}`",
        "\u201c{}\u201d.",
        "> {}\n> and be quick",
    ],
)
@pytest.mark.parametrize("width", [0, 1, 40, 80])
def test_an_invitation_is_found_in_what_was_pasted(pasted: str, width: int):
    text = format_invitation(INVITATION)
    if width:
        at = max(width, len(PREFIX))
        text = "\n".join([text[:at], *(text[begin : begin + width] for begin in range(at, len(text), width))])
    assert parse_invitation(pasted.format(text)) == INVITATION


def test_no_prefix_of_an_invitation_is_one():
    text = format_invitation(INVITATION)
    for length in range(len(text)):
        with pytest.raises(UsageError):
            parse_invitation(text[:length])


def test_every_changed_character_is_noticed():
    text = format_invitation(INVITATION)
    for index in range(len(PREFIX), len(text) - 1):
        other = "A" if text[index] != "A" else "B"
        with pytest.raises(UsageError, match=r"cut off|checksum"):
            parse_invitation(text[:index] + other + text[index + 1 :])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "starting with 'fusion1-'"),
        ("fusion2-abcd", "starting with 'fusion1-'"),
        ("https://example.org", "starting with 'fusion1-'"),
        ("fusion1-", "cut off"),
        ("fusion1-ab cd", "cut off"),
        ("fusion1-äöü", "cut off"),
        ("fusion1-abcd/efg", "cut off"),
        ("fusion1-" + "A" * 5000, "first 4096 characters"),
        ("fusion1-" + "A" * 70_000, "at most 65536 characters"),
        (spell("text"), "can't be decoded"),
        (spell(["friends", [], bytes(32), bytes(16)]), "can't be decoded"),
        (spell(["friends", ["tcp://x:1"], bytes(31), bytes(16)]), "can't be decoded"),
        (spell(["friends", ["tcp://x:1"], bytes(32), bytes(15)]), "can't be decoded"),
        (spell(["", ["tcp://x:1"], bytes(32), bytes(16)]), "can't be decoded"),
    ],
)
def test_a_bad_text_is_the_users_mistake(text: str, said: str):
    with pytest.raises(UsageError, match=said) as error:
        parse_invitation(text)
    assert "ask the pool's owner" in str(error.value)


def test_the_secret_shows_neither_in_repr_nor_in_errors():
    text = format_invitation(INVITATION)
    with pytest.raises(UsageError) as error:
        parse_invitation(text[:-3])
    assert text[20:40] not in str(error.value)
    assert repr(INVITATION.token) not in repr(INVITATION)
