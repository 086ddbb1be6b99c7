"""Messages of a serving job, for loading stages, generating tokens, rebuilding caches and checking work.

A *pass* carries the next tokens of many sessions through all stages. The driver numbers sessions, pages and passes; a
stage has paged memory and a program and follows the messages. Rounds begin with `Enlist`, as in training.

Neighbours: `wire.messages` has these messages in its union; `coordination.serving.driver` decides, `execution.serving`
and the serving driver send."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from fusionai.wire.base import Count, Fence, Job, Name, Peer, Seconds, Secret, TensorHeader, Text, WireMessage
from fusionai.wire.job import WeightSource, WeightSpec

WeightFormat = Literal["fp32", "bf16", "fp16", "int8", "int4", "packed"]
"""Format in which a stage keeps its matrices. `int8` and `int4` are weight-only, with one scale per output row or
group. `packed`: as a quantised file holds them; numbers and results are those of `fp32`, which is the format of
matrices that no file holds packed."""
CacheFormat = Literal["fp32", "bf16", "fp16", "int8"]
StateOutput = Literal["hidden", "features"]
"""Output from which a head of the job owner guesses tokens: the hidden states before the model's own head, or those of
three layers side by side."""
MAX_SESSIONS: Final = 4096
MAX_PAGES: Final = 1_048_576
MAX_ADAPTERS: Final = 1024
MAX_TEXT: Final = 65_536
"""Most positions of a segment, and of a text that is checked."""
MAX_SPANS: Final = 1024
"""Most images of a segment whose positions see each other."""
Spans = Annotated[tuple[tuple[Count, Count], ...], Meta(max_length=MAX_SPANS)]
"""(start, end) of ranges of positions, ascending and apart. The positions of a range see each other: each sees all keys
before the end, where others see the keys up to themselves."""


class ServeOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Serving options, the same for all stages of a job."""

    weights: WeightFormat = "fp32"
    cache: CacheFormat = "fp32"
    page_tokens: Annotated[int, Meta(ge=1, le=1024)] = 16
    """Positions per page of the cache."""
    pages: Annotated[int, Meta(ge=1, le=MAX_PAGES)]
    """Pages that every stage has for each of its attention layers without a window."""
    sessions: Annotated[int, Meta(ge=1, le=MAX_SESSIONS)]
    """Most sessions at a time. Layers with a window or a state keep a ring buffer or states per session."""
    pass_tokens: Annotated[int, Meta(ge=1, le=65_536)]
    """Most positions in one pass."""
    retain: bool = True
    """Keep sent values, by page, so that the next stage's cache can be rebuilt on another peer."""
    adapter_ranks: Annotated[tuple[Annotated[int, Meta(ge=1, le=65_536)], ...], Meta(max_length=MAX_ADAPTERS)] = ()
    """Ranks of the adapters next to the model, in the order of their numbers, which begin with 1."""
    whole: bool = False
    """Each text is computed as a whole every time: stages keep their inputs in pages, instead of keys and values."""
    at_once: bool = False
    """Every segment is a whole text, of which stages keep nothing to continue it: the model is an encoder, whose
    positions depend on later ones too."""


class Segment(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """`length` positions of a session in a pass, beginning with position `start`. The stage first drops what its cache
    has of the session from `start` on. `pages` are written into the session's page table from entry `first_page` on and
    end the table. `adapter`: number of the session's adapter, 0 for none."""

    session: Count
    start: Count
    length: Annotated[int, Meta(ge=1, le=MAX_TEXT)]
    first_page: Count = 0
    pages: Annotated[tuple[Annotated[int, Meta(ge=0, lt=MAX_PAGES)], ...], Meta(max_length=65_536)] = ()
    adapter: Annotated[int, Meta(ge=0, le=MAX_ADAPTERS)] = 0
    source: Count = 0
    """The session begins at `start` as a copy of this one, which the stage has up to there; 0: it is none."""
    kept_as: Count = 0
    """What the stage has of the session after the segment is also kept as this session; 0: it is not."""
    together: Spans = ()
    """Ranges within the segment whose positions see each other."""


class StageDelay(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Times of one stage for a pass, on its own clock: waiting in the queue and computing."""

    stage: Count
    queued_s: Seconds
    compute_s: Seconds


class Load(WireMessage, frozen=True, kw_only=True, tag="load"):
    """Driver -> member, after `Enlist`: load this stage's program and weights. Answered by `Loaded` or `StageFailed`. A
    stage that is already loaded answers at once and keeps its caches. Tensor `graph` (uint8): canonical JSON of the
    stage's graph. `boundary` as in `Attach`."""

    fence: Fence
    job: Job
    stage: Count
    stages: Count
    graph_hash: Name
    boundary: msgspec.Raw
    options: ServeOptions
    standby: bool = False
    """Load the weights only: this member is a standby of the stage."""
    fresh: bool = False
    """Drop all caches of this stage and everything it retained, because they may be out of date."""
    select: bool = False
    """Send on only the rows that a pass wants, because everything after this stage works row by row."""
    sketches: Secret = b""
    """Secret from which keys are derived to sketch all rows received and sent; empty: no sketches."""
    weights: Annotated[tuple[WeightSpec, ...], Meta(max_length=100_000)] = ()
    sources: Annotated[tuple[WeightSource, ...], Meta(max_length=4096)] = ()
    """Sources in order of preference. The job owner comes last."""
    tensors: Annotated[tuple[TensorHeader, ...], Meta(max_length=64)] = ()


class Loading(WireMessage, frozen=True, kw_only=True, tag="loading"):
    """Member -> driver, from time to time while it fetches weights: progress in bytes."""

    fence: Fence
    stage: Count
    done_bytes: Count
    total_bytes: Count


class Loaded(WireMessage, frozen=True, kw_only=True, tag="loaded"):
    """Member -> driver: the stage is ready for passes (on `standby`: its weights are loaded)."""

    fence: Fence
    stage: Count
    standby: bool
    fingerprint: Name
    resident_bytes: Count
    """Bytes of the weights, in their serving format, and of the cache."""
    fetched_bytes: Annotated[tuple[tuple[Peer, Count], ...], Meta(max_length=4096)] = ()
    """Bytes fetched from each source, without what was already on this machine."""
    cached: Annotated[tuple[tuple[Count, Count], ...], Meta(max_length=MAX_SESSIONS)] = ()
    """(session, positions) that are still valid in its cache."""


class Pass(WireMessage, frozen=True, kw_only=True, tag="pass"):
    """Driver or stage -> next stage: values of all `segments`, packed in order along the sequence. Values that only
    later stages need travel along. `rebuild`: the last stage to compute the pass, which then answers `Rebuilt` instead
    of sending on; -1: an ordinary pass."""

    fence: Fence
    number: Count
    producer: Annotated[int, Meta(ge=-1, le=2**20)]
    consumer: Count
    segments: Annotated[tuple[Segment, ...], Meta(max_length=MAX_SESSIONS)]
    wanted: Annotated[tuple[Count, ...], Meta(max_length=65_536)] = ()
    """Rows (positions along the packed sequence) whose outputs the driver wants, ascending."""
    output: Literal["logits", "hidden"] = "logits"
    state_rows: Annotated[tuple[Count, ...], Meta(max_length=65_536)] = ()
    """Rows whose `states` the driver wants besides, ascending."""
    states: StateOutput = "hidden"
    """Output that has the states."""
    forget: Annotated[tuple[Count, ...], Meta(max_length=MAX_SESSIONS)] = ()
    """Sessions that have ended. Their caches are dropped before this pass is computed."""
    hops: Annotated[tuple[StageDelay, ...], Meta(max_length=4096)] = ()
    rebuild: Annotated[int, Meta(ge=-1, le=2**20)] = -1
    tensors: Annotated[tuple[TensorHeader, ...], Meta(max_length=4096)] = ()


class PassResult(WireMessage, frozen=True, kw_only=True, tag="pass_result"):
    """Last stage -> driver: the output of the wanted rows, shape [1, rows, vocabulary or hidden size], and the states
    of the rows of which they were wanted, by the names of the outputs."""

    fence: Fence
    number: Count
    stage: Count
    hops: Annotated[tuple[StageDelay, ...], Meta(max_length=4096)] = ()
    tensors: Annotated[tuple[TensorHeader, ...], Meta(max_length=64)] = ()


class Rebuild(WireMessage, frozen=True, kw_only=True, tag="rebuild"):
    """Driver -> member with `stage`: send again what the stage retains of these segments, for stages `stage` + 1 to
    `through`, whose caches are empty. It is sent as passes of at most `pass_tokens`, each with one or more segments."""

    fence: Fence
    stage: Count
    through: Count
    number: Count
    segments: Annotated[tuple[Segment, ...], Meta(max_length=MAX_SESSIONS)]


class Rebuilt(WireMessage, frozen=True, kw_only=True, tag="rebuilt"):
    """Stage -> driver: the cache contains the whole segment."""

    fence: Fence
    stage: Count
    number: Count
    session: Count
    length: Count


class PassFailed(WireMessage, frozen=True, kw_only=True, tag="pass_failed"):
    """Stage -> driver: this pass could not be computed. The stage and its other sessions go on."""

    fence: Fence
    stage: Count
    number: Count
    reason: Text


class Working(WireMessage, frozen=True, kw_only=True, tag="working"):
    """Stage -> driver, every second while passes are present: it has computed pass `number`, which may be of an earlier
    round, for `busy_s` so far. `number` -1: no pass is being computed; `busy_s` is the age of the first waiting pass,
    or 0.0 if none waits and some were computed since the last message."""

    fence: Fence
    stage: Count
    number: Annotated[int, Meta(ge=-1, le=2**62)]
    busy_s: Seconds


class RequestSketches(WireMessage, frozen=True, kw_only=True, tag="request_sketches"):
    """Driver -> member: report your sketches of these positions of a text that has ended. Answered by
    `TextSketches`."""

    fence: Fence
    stage: Count
    number: Count
    session: Count
    start: Count
    length: Annotated[int, Meta(ge=1, le=MAX_TEXT)]


class TextSketches(WireMessage, frozen=True, kw_only=True, tag="text_sketches"):
    """Answer to `RequestSketches`: tensors `got` and `gave`, float32 [positions, 16]. NaN where the stage has no
    sketch."""

    fence: Fence
    stage: Count
    number: Count
    tensors: Annotated[tuple[TensorHeader, ...], Meta(max_length=2)] = ()


class ReadAgain(WireMessage, frozen=True, kw_only=True, tag="read_again"):
    """Driver -> verifier: compute a text of `stage` again, all positions at once, and report the sketches in a
    `ReadText`. Answered first by `Reading`; then the stage's inputs arrive as `ShownRows`."""

    fence: Fence
    stage: Count
    number: Count
    session: Count
    length: Annotated[int, Meta(ge=1, le=MAX_TEXT)]
    adapter: Annotated[int, Meta(ge=0, le=MAX_ADAPTERS)] = 0
    together: Spans = ()
    """Ranges of the text whose positions see each other."""
    keys: tuple[Secret, Secret]
    """The stage's own key for this text, and the key of the stage that received its rows."""
    reply: Fence
    """Fence for the answer. A standby may have been enlisted under a different one."""


class Reading(WireMessage, frozen=True, kw_only=True, tag="reading"):
    """Verifier -> driver: ready to receive the stage's inputs."""

    fence: Fence
    stage: Count
    number: Count


class ShowRows(WireMessage, frozen=True, kw_only=True, tag="show_rows"):
    """Driver -> member: send the verifier `peer` what your `stage` sent on and retains of this text, as `ShownRows`."""

    fence: Fence
    stage: Count
    number: Count
    segment: Segment
    peer: Peer
    reply: Fence
    """Fence under which the verifier accepts the rows."""


class ShownRows(WireMessage, frozen=True, kw_only=True, tag="shown_rows"):
    """Member -> verifier, in order: rows from position `start` on, as `stage` sent them. Stage -1 is the driver."""

    fence: Fence
    stage: Annotated[int, Meta(ge=-1, le=2**20)]
    number: Count
    start: Count
    tensors: Annotated[tuple[TensorHeader, ...], Meta(max_length=4096)] = ()


class ReadText(WireMessage, frozen=True, kw_only=True, tag="read_text"):
    """Verifier -> driver: sketches of all positions, float32 [positions, 16]. Tensors `got` and `gave`: the sketches
    the stage should have. `seen`: the sketches that the receiver of its rows should have."""

    fence: Fence
    stage: Count
    number: Count
    moved: Annotated[float, Meta(ge=0, le=1)] = 1.0
    """Norm of what the stage adds to its rows, relative to the rows. Errors are judged against this added part, not
    against what passes through unchanged."""
    tensors: Annotated[tuple[TensorHeader, ...], Meta(max_length=3)] = ()


class CheckFailed(WireMessage, frozen=True, kw_only=True, tag="check_failed"):
    """Member -> driver: the data requested for a check is not available (any more). The stage itself has not failed."""

    fence: Fence
    stage: Count
    number: Count
    reason: Text
