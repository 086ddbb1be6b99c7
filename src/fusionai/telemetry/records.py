"""What telemetry may say: steps and metrics, as a schema. Decides the closed sets of names; writes nothing.

A record is numbers, a name from a closed set and the ids it belongs to. There is no field for free text, so that no
text of the data, no token and no secret can get into a file by way of a log call. Neighbours: `recorder` writes these.
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
Id = Annotated[str, Meta(max_length=128, pattern=r"^[a-z0-9][a-z0-9-]*$")]


class Origin(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What every record carries. Raises `ValueError` on an id that is not one, so that no text slips in as an id."""

    job: Id
    peer: Id
    plan_version: int

    def __post_init__(self) -> None:
        for name, value in (("job", self.job), ("peer", self.peer)):
            if not _ID.fullmatch(value):
                raise ValueError(f"expected the {name} as lower-case letters, digits and dashes, got {value!r}")


class Work(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A piece of a stage's work. A step has hundreds: an array of whole microseconds takes a tenth of an object's room.

    `start_us` counts from the record's `at_s`: the work of a committed step comes before it, so it is negative."""

    kind: WorkKind
    microbatch: int
    start_us: int
    took_us: int

    def __post_init__(self) -> None:
        if self.kind not in WORK_KINDS:
            raise ValueError(f"unknown work {self.kind!r}; known: {', '.join(sorted(WORK_KINDS))}")


class StepRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="kind", tag="step"):
    """A training step, in one line. `work` is there for some of the steps only, `busy_s` always."""

    origin: Origin
    step: int
    at_s: float
    metrics: dict[MetricName, float | None]
    busy_s: dict[int, float]
    """Stage -> seconds it computed (waiting and sending left out)."""
    work: dict[int, tuple[Work, ...]] = {}
    """Stage -> its pieces of work, in the order they ran."""

    def __post_init__(self) -> None:
        if unknown := self.metrics.keys() - METRIC_NAMES:
            raise ValueError(f"unknown metric {min(unknown)!r}; known: {', '.join(sorted(METRIC_NAMES))}")


class MetricRecord(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="kind", tag="metric"
):
    """A number at a step. `value` is None where it was infinite or not a number, for which JSON has no word."""

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
