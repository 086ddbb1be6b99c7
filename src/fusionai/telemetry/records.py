"""The schema of telemetry: steps and metrics, with closed sets of names.

A record consists of numbers, a name from a closed set, and the ids it belongs to. It has no field for free text, so no
text of the data, token or secret can get into a file through a log call. `recorder` writes these records.
"""

from __future__ import annotations

import re
from typing import Annotated, Final, Literal, get_args

import msgspec
from msgspec import Meta

WorkKind = Literal["forward", "backward", "weights", "apply", "send", "wait"]
MetricName = Literal[
    "train.loss",
    "train.learning_rate",
    "train.grad_norm",
    "train.tokens_per_s",
    "train.step_s",
    "eval.loss",
    "stage.busy",
    "stage.peak_memory_bytes",
    "link.sent_bytes",
    "link.received_bytes",
    "link.round_trip_s",
    "telemetry.dropped",
]
WORK_KINDS: Final[frozenset[str]] = frozenset(get_args(WorkKind))
METRIC_NAMES: Final[frozenset[str]] = frozenset(get_args(MetricName))

_ID: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,127}")
"""An id: up to 128 lower-case letters, digits and dashes, with no dash at the start."""
Id = Annotated[str, Meta(max_length=128, pattern=r"^[a-z0-9][a-z0-9-]*$")]


class Origin(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Ids in every record. Raises `ValueError` for an invalid id, so that no free text gets in as an id."""

    job: Id
    peer: Id
    plan_version: int

    def __post_init__(self) -> None:
        for name, value in (("job", self.job), ("peer", self.peer)):
            if not _ID.fullmatch(value):
                raise ValueError(f"expected the {name} as lower-case letters, digits and dashes, got {value!r}")


class Work(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A piece of a stage's work. It is encoded as an array of whole microseconds, which takes a tenth of an object's
    size, since a step has hundreds of pieces.

    `start_us` is relative to the record's `at_s`. It is negative, because a step's work ends before its commit.
    """

    kind: WorkKind
    microbatch: int
    start_us: int
    took_us: int

    def __post_init__(self) -> None:
        if self.kind not in WORK_KINDS:
            raise ValueError(f"unknown work {self.kind!r}; known: {', '.join(sorted(WORK_KINDS))}")


class StepRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="kind", tag="step"):
    """A training step, in one line. `busy_s` is always present, `work` only in some of the steps."""

    origin: Origin
    step: int
    at_s: float
    metrics: dict[MetricName, float | None]
    busy_s: dict[int, float]
    """Stage -> seconds it computed, without waiting and sending."""
    work: dict[int, tuple[Work, ...]] = {}
    """Stage -> its pieces of work, in the order in which they ran."""

    def __post_init__(self) -> None:
        if unknown := self.metrics.keys() - METRIC_NAMES:
            raise ValueError(f"unknown metric {min(unknown)!r}; known: {', '.join(sorted(METRIC_NAMES))}")


class MetricRecord(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="kind", tag="metric"
):
    """A number at a step. `value` is None if it was infinite or NaN, which JSON can't express."""

    name: MetricName
    origin: Origin
    step: int
    stage: int | None = None
    at_s: float
    value: float | None

    def __post_init__(self) -> None:
        if self.name not in METRIC_NAMES:
            raise ValueError(f"unknown metric {self.name!r}; known: {', '.join(sorted(METRIC_NAMES))}")


Record = StepRecord | MetricRecord
