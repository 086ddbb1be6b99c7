"""Messages of a round in any job: opening a connection, adopting a fence, and losing a stage or a link."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from fusionai.wire.base import (
    Blob,
    Count,
    Fence,
    Job,
    Name,
    Neighbour,
    Peer,
    Placement,
    RefusalCode,
    Text,
    WireMessage,
)


class OpenJob(WireMessage, frozen=True, kw_only=True, tag="open_job"):
    """First message on a connection between members of a job: the dialling side shows its ticket."""

    job: Job
    fence: Fence
    ticket: Blob
    placement: Placement = b""
    """The placement of this round, signed by the job's owner. The owner itself needs none."""
    task: Literal["train", "serve"] = "train"
    """Kind of worker that the listener opens if it has no part in this job yet."""


class Enlist(WireMessage, frozen=True, kw_only=True, tag="enlist"):
    """Driver -> member, first message of every round and once per member: adopt this (higher) fence. It defines the
    member's whole part in the job: the member drops stages that `neighbours` places elsewhere and keeps snapshots."""

    fence: Fence
    job: Job
    neighbours: Annotated[tuple[Neighbour, ...], Meta(max_length=4096)]
    standbys: Annotated[tuple[Count, ...], Meta(max_length=4096)] = ()
    """Stages whose snapshots the receiver keeps."""
    partition: Name = ""
    """Identifies the cut of the graph. Snapshots of another cut are dropped."""
    ticket: Blob
    """The receiver's own ticket, for the connections it dials."""
    placement: Placement
    """Signed by the job's owner and shown with the ticket. Members accept no connection from a key that it does not
    name."""


class SnapshotAt(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True, order=True):
    """A complete state of `stage` after `step` steps."""

    stage: Count
    step: Count


class Enlisted(WireMessage, frozen=True, kw_only=True, tag="enlisted"):
    """Member -> driver, answer to `Enlist`: the snapshots it holds. Its stages answer with `Status`."""

    fence: Fence
    fingerprint: Name
    snapshots: Annotated[tuple[SnapshotAt, ...], Meta(max_length=4096)] = ()


class Detach(WireMessage, frozen=True, kw_only=True, tag="detach"):
    """Driver -> member: the job is over for this member. Drop all its stages and snapshots."""

    fence: Fence
    reason: Text = ""


class StageFailed(WireMessage, frozen=True, kw_only=True, tag="stage_failed"):
    """Member -> driver: the stage can't go on."""

    fence: Fence
    stage: Count
    code: RefusalCode
    reason: Text


class LinkLost(WireMessage, frozen=True, kw_only=True, tag="link_lost"):
    """Member -> driver: the connection to `peer` broke, fell silent or could not be opened."""

    fence: Fence
    peer: Peer
    reason: Text
