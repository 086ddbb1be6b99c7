"""Messages between the broker and a member: joining, leases, jobs, invitations, and introductions between two members.

A member that can't dial another one asks the broker to introduce it. The broker answers with a pairing token and sends
the other side a token of its own; both sides then connect as the introduction says (`transport.conversation`
asks, `broker.reachability` answers). No message of this module carries text, tokens or tensors of a job."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from fusionai.wire.base import Addresses, Blob, Count, Job, Name, Peer, Seconds, StepIndex, Text, WireMessage

RouteKind = Literal["lan", "direct", "quic", "relay"]
"""Route of a link: within one network, direct over the internet, direct through routers by UDP, or over a relay that
sees only ciphertext."""
MAX_LINKS: Final = 256
"""Most links of one peer in a report. Further ones are left out."""
MAX_NEAR: Final = 16
"""Most nearby peers that the broker names to a new member."""
MAX_LEDGER_BYTES: Final = 8 * 2**20
"""Largest signed ledger: about 40,000 entries."""
MAX_EXCLUDED: Final = 2_048
"""Most members that a job in the queue may exclude."""

CodeShare = Annotated[bytes, Meta(min_length=33, max_length=33)]
"""One side's share of a key that both derive from a join code: a side byte and a point of Ed25519."""


class Meet(WireMessage, frozen=True, kw_only=True, tag="meet"):
    """A member asks the broker to introduce it to another member that it can't dial."""

    peer: Peer
    """Peer that the asking side wants to reach."""
    addresses: Addresses = ()
    """Addresses where the asking side can be dialled now, so that the other side can try at the same time."""


class Introduced(WireMessage, frozen=True, kw_only=True, tag="introduced"):
    """Answer to `Meet`: the other side has been notified."""

    token: Blob
    """Pairing token of the asking side (`transport.security.signed`), to show to the relay; empty: there is no
    relay."""
    addresses: Addresses = ()
    """Addresses where the other side listens now."""


class MeetNotice(WireMessage, frozen=True, kw_only=True, tag="meet_notice"):
    """The broker tells a peer that another member wants to reach it and can't dial it: connect to the relay."""

    peer: Peer
    """Peer that wants to reach the receiver."""
    token: Blob
    """Pairing token of the receiving side (`transport.security.signed`), to show to the relay; empty: there is no
    relay."""
    addresses: Addresses = ()
    """Addresses where the other side can be dialled now."""


class Observe(WireMessage, frozen=True, kw_only=True, tag="observe"):
    """A member asks the broker from which address its connection comes, and whether one of its ports can be dialled."""

    port: Annotated[int, Meta(ge=0, le=65_535)] = 0
    """TCP port for the broker to dial at that address; 0: none."""


class Observed(WireMessage, frozen=True, kw_only=True, tag="observed"):
    """Answer to `Observe`."""

    host: Name
    """Source address of the connection, as the broker sees it; empty if the transport has none."""
    port: Annotated[int, Meta(ge=0, le=65_535)] = 0
    """Source port of the connection. It differs from the member's own port if a router translates addresses."""
    reachable: bool = False
    """Whether the asking peer itself answered at that address and the port it named."""
    udp_port: Annotated[int, Meta(ge=0, le=65_535)] = 0
    """QUIC port of the broker's machine that answers the same question for UDP; 0: none."""


class LinkView(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """An open or probed link of a peer: to which peer, and by which route."""

    peer: Peer
    route: RouteKind
    """Route: within one network, direct, through routers by UDP, or over a relay."""
    channels: Count
    """Number of connections of the link; 0: it was only probed."""
    round_trip_s: Seconds
    """Round-trip time of the network, measured between the two ends; 0: not measured."""
    bandwidth_bytes_per_s: Annotated[float, Meta(ge=0, le=1e15)] = 0.0
    """Highest rate delivered so far, a lower bound of the link's bandwidth; 0: not measured."""
    loss: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Fraction of the packets that had to be sent again."""
    probed_bytes_per_s: Annotated[float, Meta(ge=0, le=1e15)] = 0.0
    """Bandwidth that a probe of the idle link measured, within one network; 0: not probed."""


class Near(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Another peer that the broker sees at the same address, perhaps in the same home network."""

    peer: Peer
    addresses: Addresses


class JoinRequest(WireMessage, frozen=True, kw_only=True, tag="join"):
    """A stranger with an invitation asks for a certificate. Sent on a connection without a client certificate."""

    token: Annotated[bytes, Meta(max_length=64)]
    public_key: Annotated[bytes, Meta(min_length=32, max_length=32)]
    purpose: Literal["provider", "owner"]


class JoinGranted(WireMessage, frozen=True, kw_only=True, tag="joined"):
    """DER certificates: the newcomer's own and the pool's authority."""

    peer: Peer
    certificate: Blob
    authority: Blob


class CodeOffer(WireMessage, frozen=True, kw_only=True, tag="code_offer"):
    """A stranger that was given a code begins the exchange of `transport.security.code_exchange`. Sent on a connection
    without a client certificate."""

    share: CodeShare
    """Its share of the key."""


class CodeAnswer(WireMessage, frozen=True, kw_only=True, tag="code_answer"):
    """Answer to `CodeOffer`. It says nothing about the code to a machine that does not know it."""

    share: CodeShare
    """The broker's share of the key."""


class CodeProof(WireMessage, frozen=True, kw_only=True, tag="code_proof"):
    """The stranger shows that it knows the code."""

    proof: Annotated[bytes, Meta(min_length=32, max_length=32)]
    """Message authentication code under the exchange's key."""


class CodeAccepted(WireMessage, frozen=True, kw_only=True, tag="code_accepted"):
    """Answer to a right `CodeProof`."""

    sealed: Annotated[bytes, Meta(max_length=3072)]
    """An invitation for one machine, encrypted and authenticated under the exchange's key."""


class Register(WireMessage, frozen=True, kw_only=True, tag="register"):
    """A provider offers itself. `boot` differs at each start of the process. `profile` is `scheduling.PeerProfile`."""

    boot: Count
    profile: msgspec.Raw
    addresses: Addresses


class Registered(WireMessage, frozen=True, kw_only=True, tag="registered"):
    """The broker has registered a provider; says how often the provider must send a heartbeat."""

    heartbeat_s: Seconds
    pool: Name
    near: Annotated[tuple[Near, ...], Meta(max_length=MAX_NEAR)] = ()
    """Other peers whose connections come from the same address as this one's."""
    wall_s: Seconds = 0.0
    brokers: Addresses = ()
    """Addresses of the pool's brokers. Members keep those that they did not know."""


class Heartbeat(WireMessage, frozen=True, kw_only=True, tag="heartbeat"):
    """Peer -> broker: this process is alive and works on these jobs."""

    boot: Count
    jobs: Annotated[tuple[Job, ...], Meta(max_length=64)] = ()
    links: Annotated[tuple[LinkView, ...], Meta(max_length=MAX_LINKS)] = ()
    """Current links to other members, for display, and links it has probed, for planners."""


class HeartbeatAck(WireMessage, frozen=True, kw_only=True, tag="heartbeat_ack"):
    """The lease is renewed from now on."""

    wall_s: Seconds = 0.0
    job: Name = ""
    """The job that has this member; empty if none has."""
    plan_version: Count = 0
    """The newest plan version of the pool. Tickets for other jobs with this version or an older one are void."""
    revocations: Count = 0
    """Version of the list of evicted members. A member with an older one asks for it."""
    brokers: Addresses = ()
    """Addresses of the pool's brokers; empty except in the answer to a connection's first heartbeat."""


class RevocationQuery(WireMessage, frozen=True, kw_only=True, tag="revocation_query"):
    """Asks for the list of evicted members."""


class Revocations(WireMessage, frozen=True, kw_only=True, tag="revocations"):
    """Answer to `RevocationQuery`."""

    signed: Blob
    """The list, signed by the pool's authority (`transport.security.revocation`); empty: no member was evicted."""
    brokers: Addresses = ()
    """Addresses of the pool's brokers: job owners send `RevocationQuery` on each connection."""


class RevocationNotice(WireMessage, frozen=True, kw_only=True, tag="revocation_notice"):
    """The broker sends the list of evicted members to all that are connected when it has changed."""

    signed: Blob
    """The list, as in `Revocations`."""


class Leave(WireMessage, frozen=True, kw_only=True, tag="leave"):
    """This machine's peer leaves the pool: after its work is handed over (`drain`), or at once."""

    drain: bool = True


class LeaveNotice(WireMessage, frozen=True, kw_only=True, tag="leave_notice"):
    """The broker tells a peer's process that its machine's owner asked it to leave."""

    drain: bool = True


class PoolQuery(WireMessage, frozen=True, kw_only=True, tag="pool_query"):
    """Asks for the members of the pool."""


class MemberView(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A member of the pool as the broker knows it."""

    peer: Peer
    state: Name
    boot: Count
    addresses: Addresses
    profile: msgspec.Raw
    machine: Name = ""
    """First key of its machine, if this is the key of a further device; empty: it is the machine's first key."""
    job: Name = ""
    stages: Annotated[tuple[Count, ...], Meta(max_length=1024)] = ()
    standbys: Annotated[tuple[Count, ...], Meta(max_length=4096)] = ()
    """Stages of that job whose snapshots this member keeps."""
    last_heard_s: Seconds = 0.0
    rests_s: Seconds = 0.0
    """In state `resting`: seconds until it may be given work again."""
    kept_for: Name = ""
    """Job that waits in the queue and for which this machine is kept free."""
    clears: Name = ""
    """Job that no longer uses this member but of which it still holds state. Until the state is cleared, the member
    gets no part in another job."""
    links: Annotated[tuple[LinkView, ...], Meta(max_length=MAX_LINKS)] = ()
    """Links to other members, from its last heartbeat."""


class PoolView(WireMessage, frozen=True, kw_only=True, tag="pool_view"):
    """Answer to `PoolQuery`."""

    members: Annotated[tuple[MemberView, ...], Meta(max_length=100_000)] = ()


class JobRequest(WireMessage, frozen=True, kw_only=True, tag="job_request"):
    """A job owner asks the broker to put a plan into force: leases, a plan version, tickets. `plan` is
    `scheduling.Plan`."""

    job: Job
    title: Name
    plan: msgspec.Raw
    steps: Count = 0


class QueueRequest(WireMessage, frozen=True, kw_only=True, tag="queue_request"):
    """A job's owner asks for a place in the queue, or which place its job has now. An owner that waits asks again every
    few seconds."""

    job: Job
    title: Name
    steps: Count = 0
    machines: Annotated[int, Meta(ge=1, le=100_000)] = 1
    """Least number of machines that the job needs."""
    memory_bytes: Count = 0
    """Least memory that these machines must lend together."""
    excluded: Annotated[tuple[Peer, ...], Meta(max_length=MAX_EXCLUDED)] = ()
    """Members that the job may not use."""
    priority: Name = ""
    """Its priority class; empty: the pool's usual one."""
    again: bool = False
    """Whether the job had a place before. Then it gets no new one if it was taken out of the queue meanwhile."""


class QueuePlace(WireMessage, frozen=True, kw_only=True, tag="queue_place"):
    """Answer to `QueueRequest`."""

    place: Count
    """Place in the queue, from 1; 0: the job has machines already and needs none."""
    waiting: Count = 0
    """Number of jobs in the queue."""
    members: Annotated[tuple[Peer, ...], Meta(max_length=100_000)] = ()
    """In the job's turn: the machines that are kept for it; empty: it is not its turn."""
    turn_s: Seconds = 0.0
    """In the job's turn: for how long they are kept."""
    why: Text = ""
    """For people: what the job waits for."""
    expected_s: Seconds = 0.0
    """Estimated time until its turn; 0: not known."""


class TicketFor(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A signed ticket (`transport.security.signed`) and the peer it is for."""

    peer: Peer
    ticket: Blob


class JobGranted(WireMessage, frozen=True, kw_only=True, tag="job_granted"):
    """`plan` with its version; one ticket per member and one for the driver; where each member listens."""

    job: Job
    plan: msgspec.Raw
    tickets: Annotated[tuple[TicketFor, ...], Meta(max_length=4096)]
    members: Annotated[tuple[MemberView, ...], Meta(max_length=4096)]
    wall_s: Seconds = 0.0


class JobReport(WireMessage, frozen=True, kw_only=True, tag="job_report"):
    """The driver reports the state of its job. It carries no text, token or tensor of the job."""

    job: Job
    state: Literal["starting", "running", "stopping", "done", "failed"]
    step: StepIndex = -1
    detail: Text = ""


class WorkShare(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """What one member has done for a job since it began, as far as the job's owner counts it."""

    peer: Peer
    steps: Count
    """Committed steps in which it ran a stage."""
    tokens: Count
    """Tokens that its stages have processed in these steps; in serving, tokens read and emitted."""
    flops: Annotated[float, Meta(ge=0, le=1e30)]
    """Operations of its blocks for them, as the planner counts them."""


class WorkReport(WireMessage, frozen=True, kw_only=True, tag="work_report"):
    """A job's owner reports what its job has committed, as sums since the run began. A newer report replaces an older
    one of the same run."""

    job: Job
    run: Name = ""
    """The run, which is another one when the job's directory was deleted: then the sums begin anew."""
    sequence: Count
    """Number of the report. It grows with every report, also over starts of the owner's process."""
    steps: Count
    """Committed steps of the job."""
    tokens: Count
    """Tokens of the job."""
    shares: Annotated[tuple[WorkShare, ...], Meta(max_length=4096)]
    """Members that have done work. Work that is disputed, and that of faulty peers, is left out."""


class LedgerQuery(WireMessage, frozen=True, kw_only=True, tag="ledger_query"):
    """Asks for what the members of the pool have lent."""


class LedgerView(WireMessage, frozen=True, kw_only=True, tag="ledger_view"):
    """Answer to `LedgerQuery`."""

    signed: Annotated[bytes, Meta(max_length=MAX_LEDGER_BYTES)]
    """The ledger, signed by the pool's authority (`transport.security.ledger`)."""


class JobQuery(WireMessage, frozen=True, kw_only=True, tag="job_query"):
    """Asks for the jobs of the pool. With `job`, asks for that job only, with its history."""

    job: Name = ""


class JobView(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A job as recorded in the broker's journal."""

    job: Job
    title: Name
    owner: Peer
    state: Name
    step: StepIndex
    steps: Count
    plan_version: Count
    started_at_s: Seconds
    place: Count = 0
    """Place in the queue, from 1; 0: it does not wait there."""
    story: Annotated[tuple[Text, ...], Meta(max_length=10_000)] = ()


class JobList(WireMessage, frozen=True, kw_only=True, tag="job_list"):
    """Answer to `JobQuery`."""

    jobs: Annotated[tuple[JobView, ...], Meta(max_length=10_000)] = ()


class JobStop(WireMessage, frozen=True, kw_only=True, tag="job_stop"):
    """End this job cleanly. Allowed to its owner and to the broker's owner."""

    job: Job


class StopNotice(WireMessage, frozen=True, kw_only=True, tag="stop_notice"):
    """The broker asks a job's driver to stop the job. `gives_way_to`: the job that gets its machines, because it is
    more urgent and the job's class gives way; empty if an authorised member asked for the stop."""

    job: Job
    gives_way_to: Annotated[str, Meta(max_length=128)] = ""


class InviteRequest(WireMessage, frozen=True, kw_only=True, tag="invite_request"):
    """The broker's owner asks for a new invitation."""

    uses: Annotated[int, Meta(ge=1, le=100_000)] = 1
    lifetime_s: Seconds = 86_400.0


class CodeRequest(WireMessage, frozen=True, kw_only=True, tag="code_request"):
    """The broker's owner asks for a new join code. An earlier one ends."""


class CodeMade(WireMessage, frozen=True, kw_only=True, tag="code_made"):
    """Answer to `CodeRequest`."""

    code: Annotated[str, Meta(pattern=r"^[0-9]{6}$")]
    """Six digits, to be typed at the machine that joins."""
    lifetime_s: Seconds
    """For how long it is valid."""
    announced: bool
    """Whether the broker announces itself, so that machines can find it without an invitation."""


class InvitationQuery(WireMessage, frozen=True, kw_only=True, tag="invitation_query"):
    """The broker's owner asks which invitations are valid."""


class InvitationView(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A valid invitation. Its text is a secret that the broker does not keep."""

    invitation: Name
    """SHA-256 of its token in hex."""
    uses_left: Count
    expires_at_s: Seconds
    peers: Annotated[tuple[Peer, ...], Meta(max_length=100_000)] = ()
    """Keys that it admitted."""


class InvitationList(WireMessage, frozen=True, kw_only=True, tag="invitations"):
    """Answer to `InvitationQuery`."""

    invitations: Annotated[tuple[InvitationView, ...], Meta(max_length=10_000)] = ()


class InvitationRevoke(WireMessage, frozen=True, kw_only=True, tag="invitation_revoke"):
    """The broker's owner withdraws an invitation. Members that it admitted stay."""

    invitation: Name
    """The beginning of its hash."""


class Evict(WireMessage, frozen=True, kw_only=True, tag="evict"):
    """The broker's owner sends a member away for good, with all keys of its machine."""

    peer: Peer


class Evicted(WireMessage, frozen=True, kw_only=True, tag="evicted"):
    """Answer to `Evict`: these keys count no more."""

    peers: Annotated[tuple[Peer, ...], Meta(max_length=1024)]


class Invited(WireMessage, frozen=True, kw_only=True, tag="invited"):
    """Answer to `InviteRequest`: text to hand to the newcomer over a channel both trust."""

    invitation: Text
