"""Who may use the broker's page: hosts, origins, secrets, sessions."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fusionai.cli.page.access import (
    LONGEST_WAIT_S,
    LOOPBACK,
    MOST_SESSIONS,
    SESSION_S,
    TRIES,
    WAIT_S,
    PageRefusal,
    RequestHead,
    check_source,
    gate_of,
)

OWN = RequestHead(
    method="POST",
    host="127.0.0.1:4780",
    origin="http://127.0.0.1:4780",
    fetch_site="same-origin",
    content_type="application/json",
)
LOOK = RequestHead(method="GET", host="localhost:4780", origin=None, fetch_site="none", content_type=None)
SECRET = "a good long secret"


def changed(head: RequestHead, **changes: object) -> RequestHead:
    given = {name: getattr(head, name) for name in RequestHead.__dataclass_fields__}
    return RequestHead(**{**given, **changes})


@pytest.mark.parametrize(
    "head",
    [
        OWN,
        LOOK,
        changed(OWN, content_type="application/json; charset=utf-8"),
        changed(OWN, fetch_site=None),
        changed(LOOK, host="[::1]:4780"),
        changed(OWN, host="LOCALHOST:4780", origin="http://localhost:4780"),
    ],
)
def test_the_page_itself_is_admitted(head: RequestHead):
    check_source(head, scheme="http", hosts=LOOPBACK)


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (changed(LOOK, host="evil.example:4780"), 403),  # a name that was rebound to this machine
        (changed(LOOK, host=None), 403),
        (changed(LOOK, host="127.0.0.1.evil.example"), 403),
        (changed(LOOK, host="[bad"), 403),
        (changed(LOOK, origin="http://evil.example"), 403),
        (changed(OWN, origin=None), 403),
        (changed(OWN, origin="null"), 403),
        (changed(OWN, origin="http://127.0.0.1:8000"), 403),  # another program of this machine
        (changed(OWN, origin="https://127.0.0.1:4780"), 403),
        (changed(OWN, fetch_site="same-site"), 403),
        (changed(OWN, fetch_site="cross-site"), 403),
        (changed(OWN, content_type=None), 415),
        (changed(OWN, content_type="text/plain"), 415),
        (changed(OWN, content_type="application/x-www-form-urlencoded"), 415),
        (changed(OWN, method="DELETE", origin=None), 403),
    ],
)
def test_other_pages_are_refused(head: RequestHead, status: int):
    with pytest.raises(PageRefusal) as refusal:
        check_source(head, scheme="http", hosts=LOOPBACK)
    assert refusal.value.status == status


def test_a_session_opens_with_the_secret_and_ends():
    gate = gate_of(SECRET)
    for shown in (None, "", "x", SECRET):
        with pytest.raises(PageRefusal, match=r"Sign in first"):
            gate.check(shown, 0.0)
    token = gate.open(SECRET, 0.0)
    gate.check(token, SESSION_S)
    gate.check(token, 2 * SESSION_S)  # its last use was half of that ago
    with pytest.raises(PageRefusal, match=r"Sign in first"):
        gate.check(token, 3 * SESSION_S + 1)
    again = gate.open(SECRET, 0.0)
    assert again != token
    gate.close(again)
    with pytest.raises(PageRefusal, match=r"Sign in first"):
        gate.check(again, 0.0)


def status_of(attempt: Callable[[], object]) -> int:
    with pytest.raises(PageRefusal) as refusal:
        attempt()
    return refusal.value.status


def test_few_tries_are_possible_and_the_right_secret_waits_too():
    gate = gate_of(SECRET)
    kept = gate.open(SECRET, 0.0)
    assert [status_of(lambda: gate.open("wrong", 0.0)) for _ in range(TRIES)] == [401] * TRIES
    assert status_of(lambda: gate.open(SECRET, WAIT_S - 1)) == 429
    gate.check(kept, WAIT_S - 1)  # who is in stays in
    assert status_of(lambda: gate.open("wrong", WAIT_S)) == 401
    assert status_of(lambda: gate.open("wrong", 2 * WAIT_S)) == 429, "the second wait is twice as long"
    now_s = 3 * WAIT_S
    for _ in range(20):
        assert status_of(lambda now_s=now_s: gate.open("wrong", now_s)) == 401
        now_s += LONGEST_WAIT_S
    gate.open(SECRET, now_s)
    assert status_of(lambda: gate.open("wrong", now_s)) == 401, "counted from zero again"
    gate.open(SECRET, now_s)


def test_there_are_few_sessions():
    gate = gate_of(SECRET)
    first = gate.open(SECRET, 0.0)
    others = [gate.open(SECRET, 1.0 + number) for number in range(MOST_SESSIONS)]
    with pytest.raises(PageRefusal, match=r"Sign in first"):
        gate.check(first, 2.0)
    for token in others:
        gate.check(token, 100.0)
