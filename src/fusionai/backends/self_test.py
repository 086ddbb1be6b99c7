"""What a device's self-test reports: each check with its verdict, in words and in figures. Also judges the figures.

Runs as a separate process, `python -m ...self_test`, because a broken driver kills the process that uses it. It writes
one line of JSON when a check begins, and one with the report at the end.

Neighbours: `torch.self_test` runs the checks on real kernels, `cli.self_test` starts the process and prints the report.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Callable
from typing import Final, Literal

import msgspec

from fusionai import __version__
from fusionai.backends.registry import open_backend
from fusionai.primitives.errors import FusionError
from fusionai.primitives.process import loading
from fusionai.wire.serving import WeightFormat

Verdict = Literal["right", "wrong", "slow", "skipped"]
"""`skipped`: the check does not apply to this device, or there was no time for it."""


class DeviceCheck(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Result of one check. `found`: a sentence; `figures`: its numbers by name."""

    name: str
    verdict: Verdict
    found: str
    figures: dict[str, float] = {}


class SelfTest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="report"):
    """The report. `versions`: of everything that chooses the device's kernels. `bits_promised`: whether the device has
    a fingerprint. Speeds are of large matrix products and of a copy, which reads and writes every byte."""

    backend: str
    device: str
    device_name: str
    threads: int
    versions: tuple[str, ...]
    bits_promised: bool
    memory_bytes: int
    memory_bandwidth_bytes_per_s: float
    matrix_flops_per_s: dict[str, float]
    checks: tuple[DeviceCheck, ...]
    took_s: float
    fusionai: str = __version__
    system: str = platform.platform(terse=True)


class Begun(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="begun"):
    """A check begins."""

    name: str


SelfTestEvent = SelfTest | Begun
LONGEST_S: Final = 100.0
"""Checks that would begin later than this are skipped, so that a self-test takes less than two minutes."""
WHOLE_RATE: Final = 1.5
"""Share above which a rate is not believed: weights that stay in a processor's caches are read faster than memory, and
other programs may have slowed the measured peak down."""


class Least(msgspec.Struct, frozen=True):
    """Share of the device's bandwidth or peak below which a rate counts as slow, on a card and on a processor."""

    card: float
    processor: float


DECODING: Final[dict[WeightFormat, Least]] = {
    "bf16": Least(0.5, 0.2),
    "int8": Least(0.35, 0.2),
    "int4": Least(0.3, 0.1),
}
"""Decoding reads each weight once per token, so memory bandwidth limits it. On cards a good engine reaches 0.85 in
bfloat16 and 0.6 with 4-bit weights for models whose layers are large; half of that is slow."""
TRAINING: Final = {"fp32": Least(0.3, 0.2), "bf16": Least(0.25, 0.1)}
"""Training is limited by matrix products: 0.5 of the peak in bfloat16 is good on cards, half of that is slow."""


def rated(name: str, what: str, share: float, least: Least, device: str, figures: dict[str, float]) -> DeviceCheck:
    """Return the check of a rate that reaches `share` of its limit."""
    enough = least.processor if device == "cpu" else least.card
    verdict: Verdict = "right" if share >= enough else "slow"
    judged = "" if verdict == "right" else f". At least {enough:.0%} is expected of this kind of device"
    if share > WHOLE_RATE:
        judged = ". More than all: the peak was measured while the machine was busy, or weights stayed in caches"
    return DeviceCheck(name=name, verdict=verdict, found=f"{what}{judged}", figures={**figures, "share": share})


def self_test(device: str, threads: int | None, begun: Callable[[str], None]) -> SelfTest:
    """Run all checks of PyTorch on the device. An error of a framework or a driver becomes a check that is wrong."""
    started_s = time.monotonic()
    backend = open_backend("torch", device=device, threads=threads)
    with loading():
        from fusionai.backends.torch.backend import TorchBackend
        from fusionai.backends.torch.self_test import checks, tested
    assert isinstance(backend, TorchBackend)
    begun("speed of matrix products and memory")
    found = tested(backend)
    results: list[DeviceCheck] = []
    for name, check in checks(found):
        if time.monotonic() - started_s > LONGEST_S:
            late = f"not run: the checks before it took {LONGEST_S:.0f} seconds"
            results.append(DeviceCheck(name=name, verdict="skipped", found=late))
            continue
        begun(name)
        try:
            results.append(check())
        except Exception as failure:  # noqa: BLE001 - any error that a driver or a kernel raises is the finding
            said = failure.message if isinstance(failure, FusionError) else f"{type(failure).__name__}: {failure}"
            results.append(DeviceCheck(name=name, verdict="wrong", found=f"failed: {said}"))
    return SelfTest(
        backend=backend.name,
        device=str(found.device),
        device_name=found.device_name,
        threads=found.threads,
        versions=found.versions,
        bits_promised=found.bits_promised,
        memory_bytes=found.memory_bytes,
        memory_bandwidth_bytes_per_s=found.bandwidth_bytes_per_s,
        matrix_flops_per_s=found.matrix_flops_per_s,
        checks=tuple(results),
        took_s=time.monotonic() - started_s,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int)
    given = parser.parse_args()

    def send(event: SelfTestEvent) -> None:
        sys.stdout.buffer.write(msgspec.json.encode(event) + b"\n")
        sys.stdout.buffer.flush()

    try:
        send(self_test(given.device, given.threads, lambda name: send(Begun(name))))
    except KeyboardInterrupt:
        return 130
    except FusionError as failure:
        sys.stderr.write(f"{failure.message} {failure.hint or ''}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
