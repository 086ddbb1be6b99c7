"""Quantities in human notation: `8GB`, `20Mbit`, `50%`, `90s`. Decides the syntax; never guesses a unit."""

from __future__ import annotations

import re
from typing import Final

from fusionai.primitives.errors import UsageError

_QUANTITY: Final = re.compile(r"^\s*(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[A-Za-z%/]*)\s*$")

_BYTES: Final = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_ROUNDS_UP: Final = 0.9995
"""Fraction of a unit from which a number rounded to three digits is shown in that unit."""
_BITS: Final = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_SECONDS: Final = {"s": 1.0, "ms": 1e-3, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def parse_bytes(text: str) -> int:
    """Parse a size: `8GB` -> 8_000_000_000, `512MiB` -> 536_870_912."""
    number, unit = _split(text, "a size such as 8GB or 512MiB")
    if unit.lower() not in _BYTES:
        raise UsageError(f"expected a size such as 8GB or 512MiB, got {text!r}.")
    return int(number * _BYTES[unit.lower()])


def parse_bandwidth_bytes_per_s(text: str) -> float:
    """Parse a bandwidth: `20Mbit` -> 2_500_000.0 bytes per second (an optional `/s` is accepted)."""
    number, unit = _split(text, "a bandwidth such as 20Mbit")
    plain = unit.lower().removesuffix("/s")
    if plain not in _BITS:
        raise UsageError(f"expected a bandwidth such as 20Mbit or 1Gbit, got {text!r}.")
    return number * _BITS[plain] / 8


def parse_rate_limit_bytes_per_s(text: str) -> float:
    """Parse a bandwidth above 0."""
    rate = parse_bandwidth_bytes_per_s(text)
    if rate <= 0:
        raise UsageError(f"expected a limit above 0, got {text!r}; without a limit leave the flag out.")
    return rate


def parse_share(text: str) -> float:
    """Parse a share: `50%` or `0.5` -> 0.5. The result is in (0, 1]."""
    number, unit = _split(text, "a share such as 50%")
    if unit not in ("", "%"):
        raise UsageError(f"expected a share such as 50%, got {text!r}.")
    share = number / 100 if unit == "%" else number
    if not 0 < share <= 1:
        raise UsageError(f"expected a share above 0% and at most 100%, got {text!r}.")
    return share


def parse_seconds(text: str) -> float:
    """Parse a duration: `90s`, `5min`, `24h` -> seconds."""
    number, unit = _split(text, "a duration such as 90s or 24h")
    if unit.lower() not in _SECONDS:
        raise UsageError(f"expected a duration such as 90s, 5min or 24h, got {text!r}.")
    return number * _SECONDS[unit.lower()]


def format_speed(per_s: float) -> str:
    """Format a rate per second with four significant digits and no exponent: `6,112`, `254.3`, `0.5`."""
    return f"{per_s:,.0f}" if per_s >= 999.95 else f"{per_s:.4g}"


def format_bytes(count: float) -> str:
    """Format a size in decimal units with three significant digits: `1.23 GB`."""
    return _scaled(count, (" TB", 1e12), (" GB", 1e9), (" MB", 1e6), (" kB", 1e3), plain=" B")


def format_count(count: float) -> str:
    """Format a count with three significant digits: `134M`, `1.2B`, `950`."""
    return _scaled(count, ("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3))


def format_flop(count: float) -> str:
    """Format a number of operations with three significant digits, to stand beside the unit FLOP: `1.23 P`."""
    return _scaled(count, (" E", 1e18), (" P", 1e15), (" T", 1e12), (" G", 1e9), (" M", 1e6))


def _scaled(count: float, *units: tuple[str, float], plain: str = "") -> str:
    """Return the count in the first of `units` (name, size), largest first, that it reaches when rounded."""
    for unit, size in units:
        if abs(count) >= size * _ROUNDS_UP:
            return f"{count / size:.3g}{unit}"
    return f"{count:.0f}{plain}"


def format_seconds(seconds: float) -> str:
    """Format a duration: `340 us`, `12.3 ms`, `4.56 s`, `3 min 20 s`."""
    if seconds < 1e-3 * _ROUNDS_UP:
        return f"{seconds * 1e6:.0f} us"
    if seconds < _ROUNDS_UP:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 1:
        return f"{seconds:.2f} s"
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def _split(text: str, expected: str) -> tuple[float, str]:
    match = _QUANTITY.match(text)
    if match is None:
        raise UsageError(f"expected {expected}, got {text!r}.")
    return float(match["number"]), match["unit"]
