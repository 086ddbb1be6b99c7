"""Random serving problems of ten kinds, heavy-tailed where machines differ: what serving plans are judged by."""

from __future__ import annotations

from math import exp
from random import Random
from typing import Final, Literal

from fusionai.scheduling.problem.types import BlockCost, Link, PeerProfile, Problem, RolePlacement, ServingNeeds
from harness.judged_pools import KINDS, factors

__all__ = ["KINDS", "judged_serving_pool"]

FORMATS: Final = ("fp32", "bf16", "fp16", "int8", "int4")
_Place = Literal["owner", "pool"]
BYTES: Final = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "int8": 1.03, "int4": 0.56}


def judged_serving_pool(kind: str, seed: int, peers: int, layers: int) -> Problem:
    """A language model of `layers` layers between an embedding and a head, on machines of this kind. Sessions, caches,
    weight formats, who has the ends, wishes and links of their own are drawn."""
    draw = Random(f"serve {kind} {seed} {peers} {layers}")
    width = draw.choice((512, 1024, 2048, 4096))
    context = draw.choice((100, 512, 2048, 4096))
    sessions = draw.choice((1, 1, 2, 5, 16))
    needs = ServingNeeds(
        weights=draw.choice(FORMATS),
        page_tokens=draw.choice((16, 16, 64)),
        context_tokens=context,
        sessions=sessions,
        cache_tokens=context * draw.choice((0, 1, max(1, sessions // 2), sessions)),
        pass_tokens=draw.choice((128, 512)),
        retain=draw.random() < 0.5,
        result_bytes=4 * 8 * width,
    )
    blocks = _blocks(draw, layers, width, needs)
    whole = sum(b.parameter_bytes + b.workspace_bytes + (sessions + 1) * b.cache_session_bytes for b in blocks)
    whole += max(needs.cache_tokens, context) * sum(b.cache_token_bytes for b in blocks)
    speed, bandwidth, latency = 10 ** draw.uniform(11, 13), 10 ** draw.uniform(6.5, 9), 10 ** draw.uniform(-4.5, -1.5)
    reading = draw.choice((0.0, 10 ** draw.uniform(9.5, 12)))
    memory = whole * 10 ** draw.uniform(-0.6, 0.5)
    tail = draw.uniform(0.5, 1.5)
    classes = [(exp(draw.gauss(0, tail)), exp(draw.gauss(0, 0.6))) for _ in range(2)]
    pool: list[PeerProfile] = []
    for number in range(peers):
        fast, large, wide, far = factors(draw, kind, number, peers, latency, tail, classes, slow=0.01, scarce=0.8)
        odd = kind != "equal" and draw.random() < 0.05
        pool.append(
            PeerProfile(
                peer=f"p{number:04}",
                flops_per_s=speed * fast,
                memory_bandwidth_bytes_per_s=reading * fast if kind == "equal" else reading * exp(draw.gauss(0, 0.5)),
                memory_bytes=max(1, int(memory * large)),
                share=1.0 if kind == "equal" else draw.choice((1.0, 1.0, 1.0, 0.5)),
                uplink=Link(bandwidth_bytes_per_s=bandwidth * wide, latency_s=far / 2),
                downlink=Link(bandwidth_bytes_per_s=bandwidth * wide * draw.choice((1.0, 5.0)), latency_s=far / 2),
                weight_formats=("fp32", "bf16") if odd else (),
            )
        )
    owner, feed, loss, kept = _owner(draw, kind, pool, speed, whole, bandwidth, latency)
    ends = 1 + kept[0] + kept[1] if "owner" in (feed, loss) else 0
    names = [peer.peer for peer in pool]
    links = {}
    if draw.random() < 0.15 and peers > 1:
        one, other = draw.sample(names, 2)
        links = {f"{one}>{other}": Link(bandwidth_bytes_per_s=1e9, latency_s=1e-5)}
    wish = draw.random()
    return Problem(
        task="serve",
        graph_hash="judged",
        blocks=blocks,
        peers=tuple(pool),
        owner=owner,
        roles=(RolePlacement(role="feed", place=feed), RolePlacement(role="loss", place=loss)),
        kept_first=kept[0],
        kept_last=kept[1],
        stages=draw.randint(1, min(peers, layers - ends)) if wish < 0.06 and layers - ends > 0 else None,
        required=(draw.choice(names),) if 0.06 <= wish < 0.1 else (),
        spares_wanted=draw.randint(0, peers - 1) if 0.1 <= wish < 0.16 else None,
        pinned={draw.randint(2, layers - 1): draw.choice(names)} if 0.16 <= wish < 0.2 and layers > 2 else {},
        excluded=(draw.choice(names),) if 0.2 <= wish < 0.24 else (),
        microbatches=1,
        microbatch_tokens=1,
        links=links,
        serving=needs,
    )


def _owner(
    draw: Random, kind: str, pool: list[PeerProfile], speed: float, whole: float, bandwidth: float, latency: float
) -> tuple[PeerProfile | None, _Place, _Place, tuple[int, int]]:
    """The job owner's machine, which may be one of the pool, where both ends lie, and how many blocks are kept."""
    place = draw.random()
    if kind != "split" and place < 0.5:
        return None, "pool", "pool", (0, 0)
    owner = PeerProfile(
        peer="owner",
        flops_per_s=speed * 10 ** draw.uniform(-1.5, 0.5),
        memory_bandwidth_bytes_per_s=draw.choice((0.0, 10 ** draw.uniform(9.5, 11))),
        memory_bytes=int(whole * 10 ** draw.uniform(-0.5, 0.3)),
        uplink=Link(bandwidth_bytes_per_s=bandwidth * 10 ** draw.uniform(-1, 0.5), latency_s=latency / 2),
        downlink=Link(bandwidth_bytes_per_s=bandwidth * 10 ** draw.uniform(-1, 0.5), latency_s=latency / 2),
    )
    if draw.random() < 0.25:
        pool[draw.randrange(len(pool))] = owner
    if kind == "split":
        return owner, "owner", "owner", draw.choice(((0, 0), (1, 1), (2, 1), (1, 2)))
    places: tuple[_Place, ...] = ("owner", "pool")
    feed, loss = draw.choice(places), draw.choice(places)
    return owner, feed, loss, (0, 0)


def _blocks(draw: Random, layers: int, width: int, needs: ServingNeeds) -> tuple[BlockCost, ...]:
    vocabulary = 8 * width
    size = BYTES[needs.weights]
    windows = draw.random() < 0.25
    heads = draw.choice((1, 4))

    def block(
        number: int, parameters: int, output_bytes: int, *, token: int = 0, session: int = 0, looked_up: int = 0
    ) -> BlockCost:
        return BlockCost(
            block=number,
            forward_flops=2.0 * parameters,
            backward_flops=0.0,
            parameter_bytes=int(size * parameters),
            trainable_bytes=0,
            activation_bytes=0,
            workspace_bytes=8 * width * needs.pass_tokens // 16,
            output_bytes=output_bytes,
            gradient_bytes=0,
            looked_up_bytes=looked_up,
            cache_token_bytes=token,
            cache_session_bytes=session,
        )

    table = vocabulary * width
    found = [block(0, table, 4 * width, looked_up=int(size * table))]
    for number in range(1, layers + 1):
        parameters = int(12 * width * width * draw.choice((1.0, 1.0, 1.0, draw.uniform(0.5, 2))))
        cache = 4 * width // heads
        ring = windows and number % 2 == 0
        found.append(
            block(number, parameters, 4 * width, token=0 if ring else cache, session=cache * 256 if ring else 0)
        )
    found.append(block(layers + 1, table, 4 * vocabulary))
    return tuple(found)
