"""The six-digit code by which a machine in the same network joins: how often it may be tried, and until when.

A code has a million values, so it withstands guessing only because it is tried a few times in all. Every shown proof
counts, right or wrong; a wrong one can't be repeated without another exchange. Exchanges that end without a proof cost
the broker computing time, and are limited too. A code is in the broker's memory only: a restart ends it.

`broker.code_door` computes the exchange (`transport.security.code_exchange`) and asks this machine before each step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from msgspec import Struct

from fusionai.coordination.machine import Machine, State, Transition

CODE_DIGITS: Final = 6
CODE_LIFETIME_S: Final = 600.0
"""Ten minutes, enough to walk to another machine (chosen)."""
MAX_TRIES: Final = 3
"""Wrong proofs after which a code is dead. An attacker guesses one of a million codes with a chance of 3 in a million
for each code that the broker's owner makes."""
MAX_EXCHANGES: Final = 16
"""Exchanges that may begin for one code. The broker computes its share of all of them when the code is made, in 8 ms
of one core each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinCode(State):
    """`expires_at_s` is on the broker's monotonic clock."""

    expires_at_s: float
    tries_left: int = MAX_TRIES
    exchanges_left: int = MAX_EXCHANGES


class ExchangeBegun(Struct, frozen=True):
    """A machine without a certificate has sent its share."""

    now_s: float


class ProofShown(Struct, frozen=True):
    """It has shown that it knows the code (`right`), or something else."""

    now_s: float
    right: bool


class CodeReplaced(Struct, frozen=True):
    """The broker's owner has made another code."""


def made_code(now_s: float, lifetime_s: float = CODE_LIFETIME_S) -> JoinCode:
    return JoinCode(entity="join code", phase="open", expires_at_s=now_s + lifetime_s)


def _begin(code: JoinCode, event: ExchangeBegun) -> JoinCode:
    if event.now_s >= code.expires_at_s:
        return replace(code, phase="expired")
    if not code.exchanges_left:
        return replace(code, phase="dead")
    return replace(code, exchanges_left=code.exchanges_left - 1)


def _judge(code: JoinCode, event: ProofShown) -> JoinCode:
    if event.now_s >= code.expires_at_s:
        return replace(code, phase="expired")
    if event.right:
        return replace(code, phase="used")
    left = code.tries_left - 1
    return replace(code, tries_left=left, phase="open" if left else "dead")


def _end(code: JoinCode, _: CodeReplaced) -> JoinCode:
    return replace(code, phase="replaced")


JOIN_CODE: Final[Machine[JoinCode]] = Machine(
    "join code",
    (
        Transition(("open",), ExchangeBegun, ("open", "expired", "dead"), _begin),
        Transition(("open",), ProofShown, ("open", "used", "expired", "dead"), _judge),
        Transition(("open",), CodeReplaced, ("replaced",), _end),
    ),
    initial=("open",),
    final=("used", "expired", "dead", "replaced"),
)
