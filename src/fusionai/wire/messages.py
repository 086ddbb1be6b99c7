"""The union of all messages that cross a network, with their encoding, and one place to import their schemas from.

A message travels in one frame (`wire.frame`): a 16-byte header, this struct as msgpack, then the raw bytes of the
tensors it carries. Fields typed `msgspec.Raw` hold a type of a higher package (a profile or a plan of `scheduling`),
which decodes it against its own schema. All sizes are bounded by the schemas, so that they are checked before memory is
allocated for them.

The schemas are in one module for each pair of sides: `connection`, `broker`, `job`, `training`, `serving`, `weights`.
`coordination` takes these messages as events and returns them as commands; `transport` moves them.
"""

from __future__ import annotations

from typing import Final

import msgspec

from fusionai.wire.base import (
    OLDEST_PROTOCOL_VERSION,
    PROTOCOL_VERSION,
    REFUSAL_SENTENCES,
    Address,
    Count,
    Fence,
    Index,
    Job,
    Mode,
    Name,
    Neighbour,
    Peer,
    RefusalCode,
    Seconds,
    Stream,
    TensorHeader,
    Text,
)
from fusionai.wire.broker import (
    MAX_LINKS,
    MAX_NEAR,
    Heartbeat,
    HeartbeatAck,
    Introduced,
    Invited,
    InviteRequest,
    JobGranted,
    JobList,
    JobQuery,
    JobReport,
    JobRequest,
    JobStop,
    JobView,
    JoinGranted,
    JoinRequest,
    Leave,
    LeaveNotice,
    LinkView,
    Meet,
    MeetNotice,
    MemberView,
    Near,
    Observe,
    Observed,
    PoolQuery,
    PoolView,
    Register,
    Registered,
    RouteKind,
    StopNotice,
    TicketFor,
)
from fusionai.wire.connection import (
    MAX_BACK_BYTES,
    Done,
    Hello,
    Ping,
    Pong,
    Probe,
    Refused,
    Welcome,
)
from fusionai.wire.job import (
    Detach,
    Enlist,
    Enlisted,
    LinkLost,
    OpenJob,
    SnapshotAt,
    StageFailed,
)
from fusionai.wire.serving import (
    MAX_TEXT,
    CheckFailed,
    Load,
    Loaded,
    Loading,
    Pass,
    PassFailed,
    PassResult,
    ReadAgain,
    Reading,
    ReadText,
    Rebuild,
    Rebuilt,
    RequestSketches,
    Segment,
    ServeOptions,
    ShownRows,
    ShowRows,
    StageDelay,
    TextSketches,
    Working,
)
from fusionai.wire.training import (
    Applied,
    Attach,
    Backward,
    Commit,
    CommitRecord,
    EvidenceMissing,
    Export,
    Forward,
    OptimizerSpec,
    OuterUpdateChunk,
    Output,
    PassSnapshot,
    Prepare,
    Prepared,
    PseudoGradient,
    Ready,
    Recheck,
    Rechecked,
    Rechecking,
    Resume,
    Saving,
    SendEvidence,
    SharedGradient,
    Sketch,
    SketchesOf,
    Snapshot,
    SnapshotKept,
    Span,
    StageOptions,
    StateChunk,
    Status,
    StepKey,
    StepNorms,
)
from fusionai.wire.weights import (
    WeightAsk,
    WeightPieces,
    WeightRefused,
    WeightSource,
    WeightSpec,
)

HANDED_ON: Final = (
    Address,
    CommitRecord,
    Count,
    Fence,
    StageDelay,
    Index,
    Job,
    JobView,
    LinkView,
    MAX_BACK_BYTES,
    MAX_LINKS,
    MAX_NEAR,
    MAX_TEXT,
    Sketch,
    SketchesOf,
    MemberView,
    Mode,
    Name,
    Near,
    Neighbour,
    OLDEST_PROTOCOL_VERSION,
    OptimizerSpec,
    PROTOCOL_VERSION,
    Peer,
    REFUSAL_SENTENCES,
    RefusalCode,
    Saving,
    Seconds,
    Segment,
    ServeOptions,
    SnapshotAt,
    Span,
    StageOptions,
    StepKey,
    StepNorms,
    Stream,
    TensorHeader,
    Text,
    TicketFor,
    RouteKind,
    WeightSource,
    WeightSpec,
)
"""Parts of messages that other packages import from here, besides the messages themselves."""

Message = (
    Hello
    | Welcome
    | Refused
    | Done
    | JoinRequest
    | JoinGranted
    | Register
    | Registered
    | Heartbeat
    | HeartbeatAck
    | Leave
    | LeaveNotice
    | PoolQuery
    | PoolView
    | JobRequest
    | JobGranted
    | JobReport
    | JobQuery
    | JobList
    | JobStop
    | StopNotice
    | InviteRequest
    | Invited
    | Meet
    | Introduced
    | MeetNotice
    | Observe
    | Observed
    | OpenJob
    | Enlist
    | Enlisted
    | Attach
    | Status
    | Resume
    | StateChunk
    | Snapshot
    | SnapshotKept
    | PassSnapshot
    | Prepare
    | Ready
    | Forward
    | Backward
    | Output
    | SharedGradient
    | Prepared
    | Recheck
    | Rechecking
    | SendEvidence
    | EvidenceMissing
    | Rechecked
    | Commit
    | PseudoGradient
    | OuterUpdateChunk
    | Applied
    | Export
    | Detach
    | StageFailed
    | LinkLost
    | Load
    | Loading
    | Loaded
    | WeightRefused
    | WeightAsk
    | WeightPieces
    | Pass
    | PassResult
    | PassFailed
    | Rebuild
    | Rebuilt
    | Working
    | RequestSketches
    | TextSketches
    | ReadAgain
    | Reading
    | ShowRows
    | ShownRows
    | ReadText
    | CheckFailed
    | Ping
    | Pong
    | Probe
)
"""Union of all messages that a connection may carry."""

_DECODER: Final = msgspec.msgpack.Decoder(Message)

_ENCODER: Final = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    return _ENCODER.encode(message)


def decode(data: bytes | bytearray | memoryview) -> Message:
    """Return the message. Raises `msgspec.ValidationError` or `DecodeError`, which `wire.frame` turns into
    `WireError`."""
    return _DECODER.decode(data)
