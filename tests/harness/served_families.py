"""One causal family of transformers as `fusion serve` meets it: saved, captured, cut into three stages, asked.

Says how the product serves the family, or why it does not. Chooses no families (`harness.families` has them).
"""

from __future__ import annotations

import time
import traceback
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import msgspec
import torch

from fusionai.backends.registry import open_backend
from fusionai.capture.served import capture_served
from fusionai.primitives.errors import FusionError
from harness.families import family_source
from harness.saved import Saved, saved
from harness.staged_serving import served
from harness.universality import answered

How = Literal["cached", "computed anew", "refused", "missed", "unready", "broken"]


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """`how`: `cached` or `computed anew` (both with transformers' logits), `refused` by the product with a sentence,
    `missed`: other logits or an error that is not the product's, `unready`: it took too long or too much memory,
    `broken`: transformers itself can't run it."""

    name: str
    architecture: str
    how: How
    reason: str = ""
    difference: float | None = None
    parameters: int = 0
    capture_s: float = 0.0
    ready_s: float = 0.0
    """Processor time of one thread from the files to three stages with their weights."""


def examine_family(name: str) -> Family:
    with TemporaryDirectory(prefix="family-") as place:
        try:
            files, module = _written(name, Path(place))
        except Exception as error:  # noqa: BLE001 - whatever transformers raises is what is reported
            return Family(name=name, architecture="", how="broken", reason=_words(error))
        try:
            return _served(name, files, module)
        except FusionError as error:
            return Family(name=name, architecture=type(module).__name__, how="refused", reason=error.message)
        except Exception as error:  # noqa: BLE001 - a traceback of the product is a finding
            return Family(name=name, architecture=type(module).__name__, how="missed", reason=_words(error))


def _written(name: str, place: Path) -> tuple[Saved, Any]:
    """The family's files, and transformers' own module of them, which runs."""
    files = saved(family_source(name), place, wide=True)
    assert files is not None
    module: Any = files.loaded().eval()
    with torch.no_grad():
        logits = module(input_ids=torch.arange(3, 20)[None], use_cache=False).logits
    if not torch.isfinite(logits).all():
        raise ValueError("its logits are not finite")
    return files, module


def _served(name: str, files: Saved, module: Any) -> Family:
    began_s = time.process_time()
    captured = capture_served(files.source)
    captured_s = time.process_time()
    family = served(captured, [open_backend("torch", device="cpu", threads=1)], module=module)
    ready_s = time.process_time()
    cell = answered(family)
    how: How = "missed" if cell.state == "missed" else "computed anew" if family.whole else "cached"
    return Family(
        name=name,
        architecture=type(module).__name__,
        how=how,
        reason=cell.reason if how == "missed" else "",
        difference=cell.difference,
        parameters=captured.n_parameters,
        capture_s=round(captured_s - began_s, 2),
        ready_s=round(ready_s - began_s, 2),
    )


def _words(error: Exception) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first} ({Path(last.filename).name}, line {last.lineno})"
