"""Fills the measured column of the catalogue from reports of self-tests (`fusion doctor --self-test --json FILE`).

Users send these files in; they lie in `scheduling/data/measured/`. A rate is the median of the reports of a device.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import PurePath
from statistics import median_low

import msgspec

from fusionai.backends.self_test import SelfTest
from fusionai.primitives.errors import RecipeError, UsageError
from fusionai.scheduling.analysis.catalogue import Catalogue, MeasuredRates

_KINDS = {"training rate": "flops_per_s", "decoding rate": "bytes_per_s"}
"""Kind of check -> the figure that counts."""


class _File(SelfTest, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="report"):
    schema: str


def with_measured(catalogue: Catalogue, files: Iterable[tuple[str, bytes]]) -> Catalogue:
    """Return the catalogue with the rates of these reports, given as (name of the file, content). Raises `RecipeError`
    for a file that is no report, of a device that is not in the catalogue or was wrong."""
    reports: defaultdict[str, list[SelfTest]] = defaultdict(list)
    for name, content in files:
        try:
            report = msgspec.json.decode(content, type=_File)
            reports[catalogue.find(report.device_name).name].append(report)
        except msgspec.DecodeError as problem:
            raise RecipeError(f"{name}: not the report of a self-test: {problem}.") from None
        except UsageError as problem:
            raise RecipeError(f"{name}: {problem.message}", hint=problem.hint) from None
        if wrong := [one.name for one in report.checks if one.verdict == "wrong"]:
            raise RecipeError(f"{name}: the self-test found {wrong[0]} wrong, so its rates mean nothing.")
    devices = (
        msgspec.structs.replace(catalogue.find(name), measured=_rates(of_device)) for name, of_device in reports.items()
    )
    return catalogue.with_devices(devices)


def _rates(reports: list[SelfTest]) -> MeasuredRates:
    found: dict[str, defaultdict[str, list[float]]] = {kind: defaultdict(list) for kind in _KINDS}
    for report in reports:
        for check in report.checks:
            kind, _, form = check.name.partition(", ")
            rate = check.figures.get(_KINDS.get(kind, ""), 0.0)
            if rate > 0:
                found[kind][form].append(rate)
    medians = {kind: {form: median_low(rates) for form, rates in forms.items()} for kind, forms in found.items()}
    count = len(reports)
    return MeasuredRates(
        training_flops_per_s=medians["training rate"],
        decoding_bytes_per_s=medians["decoding rate"],
        source=f"{count} self-test{'s' if count > 1 else ''}, {', '.join(reports[-1].versions[:2])}",
    )


def is_report(name: str) -> bool:
    """Return whether a file of the directory is a report."""
    return PurePath(name).suffix == ".json"
