"""Computes what a plan's tokens cost in energy and money, if power and prices are known.

Machines with a stage count at full power for the whole job; standbys do not count. The cost of a machine is its price
per hour (electricity included) if it has one, otherwise its electricity. A figure is given only if it is known for
every machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from fusionai.scheduling.problem.types import PeerProfile, Plan

JOULES_PER_KWH: Final = 3.6e6
_MILLION: Final = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Prices to compute with. `per_hour`: peer id -> price of an hour of the machine, electricity included."""

    currency: str = "USD"
    electricity_per_kwh: float | None = None
    per_hour: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCost:
    """Energy and money per million tokens; a figure is None if it is not known for every machine."""

    power_w: float | None
    joules: float | None
    money: float | None
    currency: str
    without_power: tuple[str, ...]
    without_price: tuple[str, ...]
    """Both: ids of peers whose figure is missing; empty if it is missing for all peers."""


def token_cost(plan: Plan, profiles: Iterable[PeerProfile], prices: Prices) -> TokenCost:
    """Cost of `plan` at its predicted speed; in serving, the speed of all sessions together."""
    known = {profile.peer: profile for profile in profiles}
    used = list(dict.fromkeys(stage.peer for stage in plan.stages))
    tokens_per_s = plan.tokens_per_s if plan.serving is None else plan.serving.tokens_per_s_together
    text_tokens = 0 if plan.serving is None else plan.serving.text_tokens
    million_s = _MILLION / (tokens_per_s * max(1, text_tokens))
    watts = {peer: known[peer].power_w for peer in used if peer in known}
    powers = [watts[peer] for peer in used if watts.get(peer) is not None]
    without_power = tuple(peer for peer in used if watts.get(peer) is None)
    power_w = None if without_power else sum(power for power in powers if power is not None)
    hourly = {peer: _per_hour(peer, watts.get(peer), prices) for peer in used}
    without_price = tuple(peer for peer in used if hourly[peer] is None)
    per_hour = None if without_price else sum(price for price in hourly.values() if price is not None)
    return TokenCost(
        power_w=power_w,
        joules=None if power_w is None else power_w * million_s,
        money=None if per_hour is None else per_hour / 3600 * million_s,
        currency=prices.currency,
        without_power=without_power if len(without_power) < len(used) else (),
        without_price=without_price if len(without_price) < len(used) else (),
    )


def _per_hour(peer: str, power_w: float | None, prices: Prices) -> float | None:
    own = prices.per_hour.get(peer)
    if own is not None:
        return own
    if power_w is None or prices.electricity_per_kwh is None:
        return None
    return power_w * 3600 / JOULES_PER_KWH * prices.electricity_per_kwh
