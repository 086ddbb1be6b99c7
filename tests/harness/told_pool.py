"""A pool that exists in words only: members, a problem, a broker's answers.

Decides nothing. Neighbours: tests of `client.pool.replanning`, `client.pool.watch` and `client.pool.beginning`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fusionai.client.pool.session import PoolMember
from fusionai.execution.connections import Deployment
from fusionai.primitives.errors import FusionError
from fusionai.primitives.ids import JobId
from fusionai.scheduling.problem.types import BlockCost, PeerProfile, Plan, Problem, RolePlacement, ServingNeeds
from fusionai.transport.security.signed import Ticket, sign_ticket
from fusionai.wire.messages import MemberView

JOB = JobId("job-1")
OWNER = PeerProfile(peer="owner", flops_per_s=1e9, memory_bytes=2**30, fingerprint="f", roles=("owner",))


def profile(name: str, *, fingerprint: str = "f") -> PeerProfile:
    return PeerProfile(peer=name, name=name, flops_per_s=1e9, memory_bytes=2**30, fingerprint=fingerprint)


def member(name: str, *, fingerprint: str = "f", **changes: Any) -> PoolMember:
    known = profile(name, fingerprint=fingerprint)
    fields: dict[str, Any] = {"state": "idle", "boot": 1, "addresses": (f"tcp://{name}:1",), **changes}
    return PoolMember(MemberView(peer=name, profile=msgspec.Raw(msgspec.msgpack.encode(known)), **fields), known)


def working(name: str, **changes: Any) -> PoolMember:
    return member(name, state="active", job=JOB, **changes)


def problem(*peers: PeerProfile, takeover: str = "exact") -> Problem:
    block = BlockCost(
        block=0,
        forward_flops=1e6,
        backward_flops=2e6,
        parameter_bytes=1000,
        trainable_bytes=1000,
        activation_bytes=10,
        output_bytes=10,
        gradient_bytes=10,
    )
    return Problem(
        graph_hash="g",
        blocks=tuple(msgspec.structs.replace(block, block=number) for number in range(5)),
        peers=peers,
        owner=OWNER,
        roles=(RolePlacement(role="feed"), RolePlacement(role="loss")),
        stages=2,
        microbatches=4,
        microbatch_tokens=8,
        takeover=takeover,  # pyright: ignore[reportArgumentType]
    )


def served(*peers: PeerProfile, weights_bytes: int = 1000) -> Problem:
    """The same blocks, served instead of trained, in any number of stages."""
    posed = problem(*peers, takeover="tolerant")
    blocks = tuple(
        msgspec.structs.replace(block, forward_flops=1e8, parameter_bytes=weights_bytes) for block in posed.blocks
    )
    needs = ServingNeeds(context_tokens=100, sessions=4, page_tokens=10, pass_tokens=20, cache_tokens=200)
    return msgspec.structs.replace(
        posed, task="serve", stages=None, microbatches=1, microbatch_tokens=1, serving=needs, blocks=blocks
    )


KEY = Ed25519PrivateKey.generate()


def ticket(expires_at_s: float) -> bytes:
    content = Ticket(
        job=JOB, peer="o" * 52, stage=-1, plan_version=1, role="driver", expires_at_s=expires_at_s, addresses=()
    )
    return sign_ticket(content, KEY)


@dataclass
class FakeClock:
    seconds: float = 100.0

    def now_s(self) -> float:
        return self.seconds

    def wall_s(self) -> float:
        return self.seconds


@dataclass
class FakePool:
    """`looks`: what each look at the pool shows or raises, the last for ever."""

    looks: list[tuple[PoolMember, ...] | FusionError]
    grants: list[FusionError | None] = field(default_factory=lambda: [None])
    asked: list[Plan] = field(default_factory=list)
    version: int = 1
    expires_at_s: float = 1e9

    async def pool(self) -> tuple[PoolMember, ...]:
        seen = self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]
        if isinstance(seen, FusionError):
            raise seen
        return seen

    async def request(self, job: JobId, title: str, plan: Plan, steps: int) -> Deployment:
        refusal = self.grants.pop(0) if len(self.grants) > 1 else self.grants[0]
        if refusal is not None:
            raise refusal
        self.asked.append(plan)
        if plan.version == 0:
            self.version += 1
            plan = msgspec.structs.replace(plan, version=self.version)
        return Deployment(plan=plan, members={"b": ("tcp://b:1",)}, tickets={"owner": ticket(self.expires_at_s)})
