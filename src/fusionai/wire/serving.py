"""Messages of a serving job: they load stages, generate tokens, rebuild caches. Decides fields and bounds.

A *pass* carries the next tokens of many sessions through all stages in one go. Sessions, pages and passes are numbered
by the driver; a stage is paged memory and a program that obeys. Rounds begin with `Enlist`, as in training.

Neighbours: `wire.messages` has them in its union; `coordination.serving` decides, `execution.serving` and the serving
driver send.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from fusionai.wire.base import (
    Addresses,
    Count,
    Fence,
    Job,
    Name,
    Peer,
    Seconds,
    Secret,
    TensorHeader,
    Text,
    WireMessage,
)

Digest = Annotated[bytes, Meta(min_length=32, max_length=32)]
"""SHA-256."""
WeightFormat = Literal["fp32", "bf16", "fp16", "int8", "int4"]
"""How a stage keeps its matrices: `int8` and `int4` are weight-only, with one scale per output row or group."""
CacheFormat = Literal["fp32", "bf16", "fp16"]
MAX_SESSIONS: Final = 4096
MAX_PAGES: Final = 1_048_576
MAX_ADAPTERS: Final = 1024
MAX_TEXT: Final = 65_536
"""Positions of a segment, and of a text that is read again."""
PIECE_BYTES: Final = 1_048_576
"""Unit in which weights are asked for and checked."""


class ServeOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How stages serve, the same for all stages of a job."""

    weights: WeightFormat = "fp32"
    cache: CacheFormat = "fp32"
    page_tokens: Annotated[int, Meta(ge=1, le=1024)] = 16
    """Positions of one page of the cache."""
    pages: Annotated[int, Meta(ge=1, le=MAX_PAGES)]
    """Pages that every stage has for each of its attention layers without a window."""
    sessions: Annotated[int, Meta(ge=1, le=MAX_SESSIONS)]
    """At most so many at a time; layers with a window keep a ring per session."""
    pass_tokens: Annotated[int, Meta(ge=1, le=65_536)]
    """At most so many positions in one pass."""
    retain: bool = True
    """Keep what is sent on, by page, so that the next stage's cache can be rebuilt elsewhere."""
    adapter_ranks: Annotated[tuple[Annotated[int, Meta(ge=1, le=65_536)], ...], Meta(max_length=MAX_ADAPTERS)] = ()
    """Of the adapters beside the model, in the order of their numbers, which begin with 1."""
    whole: bool = False
    """Each text is computed anew as a whole: stages keep what came in, in pages, instead of keys and values."""


class Segment(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """`length` positions of a session in a pass, from position `start` on; what the cache has of it from there on is
    dropped first. `pages` are written into the session's page table from entry `first_page` on and end it. `adapter`:
    the number of the adapter that the session goes through, 0 for none."""

    session: Count
    start: Count
    length: Annotated[int, Meta(ge=1, le=MAX_TEXT)]
    first_page: Count = 0
    pages: Annotated[tuple[Annotated[int, Meta(ge=0, lt=MAX_PAGES)], ...], Meta(max_length=65_536)] = ()
    adapter: Annotated[int, Meta(ge=0, le=MAX_ADAPTERS)] = 0


class Hop(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """What one stage did of a pass, on its own clock: how long it lay there, how long it was computed."""

    stage: Count
    queued_s: Seconds
    compute_s: Seconds


class WeightSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One tensor as it lies in the model's files. `pieces`: SHA-256 of each `PIECE_BYTES`, the last is shorter."""

    key: Name
    dtype: Annotated[str, Meta(max_length=16)]
    shape: Annotated[tuple[Count, ...], Meta(max_length=16)]
    digest: Digest
    """Over all its bytes; names the tensor among peers."""
    pieces: Annotated[tuple[Digest, ...], Meta(max_length=65_536)]


class WeightSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A member that has (or is fetching) tensors. `digests`: which; empty means all."""

    peer: Peer
    addresses: Addresses
    digests: Annotated[tuple[Digest, ...], Meta(max_length=100_000)] = ()


class Load(WireMessage, frozen=True, kw_only=True, tag="load"):
    """Driver -> member, after `Enlist`: have this stage's program and weights at hand. Answered by `Loaded` or
    `StageFailed`. A stage at hand already answers at once; its caches stay.

    Tensor `graph` (uint8): canonical JSON of the stage's graph. `boundary` as in `Attach`."""

    fence: Fence
    job: Job
    stage: Count
    stages: Count
    graph_hash: Name
    boundary: msgspec.Raw
    options: ServeOptions
    standby: bool = False
    """Load the weights only: this member guards the stage."""
    fresh: bool = False
    """Drop all caches of this stage, and what it retained: they may be of another time."""
    select: bool = False
    """Send on only the rows a pass wants: everything after this stage works row by row."""
    marks: Secret = b""
    """Mark all rows you get and give under keys that follow from this; empty: don't."""
    weights: Annotated[tuple[WeightSpec, ...], Meta(max_length=100_000)] = ()
    sources: Annotated[tuple[WeightSource, ...], Meta(max_length=4096)] = ()
    """In order of preference; the job owner comes last."""
    tensors: Annotated[tuple[TensorHeader, ...], Meta(max_length=64)] = ()


class Loading(WireMessage, frozen=True, kw_only=True, tag="loading"):
    """Member -> driver, now and then while it fetches: how far it is."""

    fence: Fence
    stage: Count
    done_bytes: Count
    total_bytes: Count


class Loaded(WireMessage, frozen=True, kw_only=True, tag="loaded"):
    """Member -> driver: the stage is ready for passes (on `standby`: its weights are here)."""

    fence: Fence
    stage: Count
    standby: bool
    fingerprint: Name
    resident_bytes: Count
    """Weights, as kept, and cache."""
    fetched_bytes: Annotated[tuple[tuple[Peer, Count], ...], Meta(max_length=4096)] = ()
    """By source; what lay here already is not in it."""
    cached: Annotated[tuple[tuple[Count, Count], ...], Meta(max_length=MAX_SESSIONS)] = ()
    """(session, positions) of its cache that are still good."""


class WeightRefused(WireMessage, frozen=True, kw_only=True, tag="weight_refused"):
    """Member -> driver: `source` sent bytes that are not those of this tensor; they were fetched elsewhere."""

    fence: Fence
    stage: Count
    source: Peer
    key: Name


class WeightAsk(WireMessage, frozen=True, kw_only=True, tag="weight_ask"):
    """On a state connection between members: pieces [first, first + count) of a tensor."""

    digest: Digest
    first: Count
    count: Annotated[int, Meta(ge=1, le=64)]


class WeightPieces(WireMessage, frozen=True, kw_only=True, tag="weight_pieces"):
    """Answer to `WeightAsk`: tensor `bytes` (uint8). Without it: not here (any more)."""

    digest: Digest
    first: Count
    tensors: Annotated[tuple[TensorHeader, ...], Meta(max_length=1)] = ()


class Pass(WireMessage, frozen=True, kw_only=True, tag="pass"):
    """Driver or stage -> next stage: values of all `segments`, packed in their order along the sequence.

    `rebuild`: the last stage to compute it; it then answers `Rebuilt` instead of sending on. -1: an ordinary pass.
    Values that only later stages need travel along."""

    fence: Fence
    number: Count
    producer: Annotated[int, Meta(ge=-1, le=2**20)]
    consumer: Count
    segments: Annotated[tuple[Segment, ...], Meta(max_length=MAX_SESSIONS)]
    wanted: Annotated[tuple[Count, ...], Meta(max_length=65_536)] = ()
    """Rows (positions along the packed sequence) whose outputs the driver wants, ascending."""
    output: Literal["logits", "hidden"] = "logits"
    forget: Annotated[tuple[Count, ...], Meta(max_length=MAX_SESSIONS)] = ()
    """Sessions that are over: their caches are dropped before this pass is computed."""
    hops: Annotated[tuple[Hop, ...], Meta(max_length=4096)] = ()
    rebuild: Annotated[int, Meta(ge=-1, le=2**20)] = -1
    tensors: Annotated[tuple[TensorHeader, ...], Meta(max_length=4096)] = ()


class PassResult(WireMessage, frozen=True, kw_only=True, tag="pass_result"):
    """Last stage -> driver: the output of the wanted rows, [1, rows, vocabulary or hidden size]."""

    fence: Fence
    number: Count
    stage: Count
    hops: Annotated[tuple[Hop, ...], Meta(max_length=4096)] = ()
    tensors: Annotated[tuple[TensorHeader, ...], Meta(max_length=64)] = ()


class Rebuild(WireMessage, frozen=True, kw_only=True, tag="rebuild"):
    """Driver -> member with `stage`: send what you retain of these segments once more, for stages `stage` + 1 to
    `through`, whose caches are empty. They become passes of at most `pass_tokens`, each of one segment or of many."""

    fence: Fence
    stage: Count
    through: Count
    number: Count
    segments: Annotated[tuple[Segment, ...], Meta(max_length=MAX_SESSIONS)]


class Rebuilt(WireMessage, frozen=True, kw_only=True, tag="rebuilt"):
    """Stage -> driver: the cache has all of this segment."""

    fence: Fence
    stage: Count
    number: Count
    session: Count
    length: Count


class PassFailed(WireMessage, frozen=True, kw_only=True, tag="pass_failed"):
    """Stage -> driver: this pass could not be computed; the stage and its other sessions go on."""

    fence: Fence
    stage: Count
    number: Count
    reason: Text


class Working(WireMessage, frozen=True, kw_only=True, tag="working"):
    """Stage -> driver, every second while passes are there: it computes pass `number`, which may be of an earlier
    round, for `busy_s` so far. `number` -1: none just now, though the first that waits came `busy_s` ago; 0.0 where
    none waits and some were computed since the last word."""

    fence: Fence
    stage: Count
    number: Annotated[int, Meta(ge=-1, le=2**62)]
    busy_s: Seconds


class TellMarks(WireMessage, frozen=True, kw_only=True, tag="tell_marks"):
    """Driver -> member: tell your marks of these positions of a text that is over. Answered by `ToldMarks`."""

    fence: Fence
    stage: Count
    number: Count
    session: Count
    start: Count
    length: Annotated[int, Meta(ge=1, le=MAX_TEXT)]


class ToldMarks(WireMessage, frozen=True, kw_only=True, tag="told_marks"):
    """Answer to `TellMarks`: tensors `got` and `gave`, float32 [positions, 16], not numbers where nothing is known."""

    fence: Fence
    stage: Count
    number: Count
    tensors: Annotated[tuple[TensorHeader, ...], Meta(max_length=2)] = ()


class ReadAgain(WireMessage, frozen=True, kw_only=True, tag="read_again"):
    """Driver -> referee: compute a text of `stage` again, all of it at once; what the stage got comes as `ShownRows`
    once this is answered by `Reading`. Then tell the marks, in a `ReadText`."""

    fence: Fence
    stage: Count
    number: Count
    session: Count
    length: Annotated[int, Meta(ge=1, le=MAX_TEXT)]
    adapter: Annotated[int, Meta(ge=0, le=MAX_ADAPTERS)] = 0
    keys: tuple[Secret, Secret]
    """The stage's own of this text, and that of whoever got its rows."""
    reply: Fence
    """For the answer: whoever stands by may have been brought in under another."""


class Reading(WireMessage, frozen=True, kw_only=True, tag="reading"):
    """Referee -> driver: ready for what the stage got."""

    fence: Fence
    stage: Count
    number: Count


class ShowRows(WireMessage, frozen=True, kw_only=True, tag="show_rows"):
    """Driver -> member: send the referee `peer` what your `stage` sent on of this text and retains, as `ShownRows`."""

    fence: Fence
    stage: Count
    number: Count
    segment: Segment
    peer: Peer
    reply: Fence
    """What the referee goes by."""


class ShownRows(WireMessage, frozen=True, kw_only=True, tag="shown_rows"):
    """Member -> referee, one after the other: rows from position `start` on, as `stage` sent them; -1: the driver."""

    fence: Fence
    stage: Annotated[int, Meta(ge=-1, le=2**20)]
    number: Count
    start: Count
    tensors: Annotated[tuple[TensorHeader, ...], Meta(max_length=4096)] = ()


class ReadText(WireMessage, frozen=True, kw_only=True, tag="read_text"):
    """Referee -> driver: marks of all positions, float32 [positions, 16]. Tensors `got` and `gave`: as the stage should
    have made them; `seen`: as whoever got its rows should have."""

    fence: Fence
    stage: Count
    number: Count
    moved: Annotated[float, Meta(ge=0, le=1)] = 1.0
    """How far the stage moves rows, by their size: rounding and worse is of what it adds, not of what it passes on."""
    tensors: Annotated[tuple[TensorHeader, ...], Meta(max_length=3)] = ()


class CheckFailed(WireMessage, frozen=True, kw_only=True, tag="check_failed"):
    """Member -> driver: what was asked for a check can't be told (any more). No stage fails for it."""

    fence: Fence
    stage: Count
    number: Count
    reason: Text
