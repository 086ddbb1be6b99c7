"""Fetching weights over channels within the process: resumed, checked, peers before the owner, clear failures."""

from __future__ import annotations

import asyncio
import random
import time
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from fusionai.execution.weights.fetching import FetchLimits, WeightInlet, fetch
from fusionai.execution.weights.server import MAX_CONNECTIONS, WeightServer
from fusionai.primitives.errors import ExecutionError, StorageError, TransportError
from fusionai.primitives.ids import PeerId
from fusionai.primitives.tensors import ITEMSIZE_BYTES, HostTensor, host_tensor
from fusionai.storage.weight_part import make_spec
from fusionai.storage.weight_store import WeightStore
from fusionai.transport.interface import Channel
from fusionai.wire import messages as wire
from fusionai.wire.frame import describe
from fusionai.wire.job import PIECE_BYTES, WeightSource, WeightSpec
from harness.memory_transport import MemoryNetwork
from harness.patience import CEILING_S

MIB = 2**20
OWNER, FIRST, SECOND, THIRD = (PeerId(letter * 52) for letter in "oabc")
QUICK = FetchLimits(silence_s=0.2, slow_s=0.1, retry_s=0.05, redials=1000, redial_s=0.01, give_up_s=60.0)
"""Where a silent source is given up. A source that a busy machine holds up is dialled again, as often as it takes."""
PATIENT = replace(QUICK, silence_s=20.0, slow_s=60.0, redials=3, grace_s=60.0, give_up_s=60.0)
"""Where it matters who gives what, however busy this machine is."""
HOPELESS = replace(PATIENT, grace_s=0.5, give_up_s=3.0)
"""Where nothing more can come."""
Serve = Callable[[Channel], Awaitable[None]]


@cache
def content(key: str, nbytes: int) -> bytes:
    return random.Random(key).randbytes(nbytes)


def described(key: str, nbytes: int) -> WeightSpec:
    data = content(key, nbytes)
    return make_spec(key, "uint8", (nbytes,), [data[at : at + PIECE_BYTES] for at in range(0, nbytes, PIECE_BYTES)])


SPECS = (described("embed", 9 * MIB + 17), described("norm", 300), described("mlp", 3 * MIB), described("none", 0))
TOTAL_BYTES = sum(spec.shape[0] for spec in SPECS)


WRITTEN: dict[Path, bytes] = {}
"""What a store of `SPECS` has written, by its name there: hashed and synced once for all tests."""


def filled(directory: Path, specs: Sequence[WeightSpec] = SPECS) -> WeightStore:
    if specs is not SPECS:
        return added(directory, specs)
    if not WRITTEN:
        store = added(directory, SPECS)
        WRITTEN.update(
            {path.relative_to(directory): path.read_bytes() for path in directory.rglob("*") if path.is_file()}
        )
        return store
    for path, data in WRITTEN.items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_bytes(data)
    return WeightStore(directory)


def added(directory: Path, specs: Sequence[WeightSpec]) -> WeightStore:
    store = WeightStore(directory)
    for spec in specs:
        store.add(spec, memoryview(content(spec.key, spec.shape[0])))
    return store


class Members:
    """Who answers at which address; what each served."""

    def __init__(self, directory: Path) -> None:
        self.network = MemoryNetwork()
        self.directory = directory
        self.desks: dict[PeerId, WeightServer] = {}
        self.refused: list[tuple[PeerId, str]] = []
        self.dials: list[str] = []
        self.listening: dict[str, tuple[str, ...]] = {}

    async def serve(self, peer: PeerId, serve: Serve, digests: tuple[bytes, ...] = ()) -> WeightSource:
        listener = await self.network.transport(peer).listen(serve, host=peer, port=0)
        self.listening[peer] = listener.addresses
        return WeightSource(peer=peer, digests=digests)

    async def desk(self, peer: PeerId, store: WeightStore, digests: tuple[bytes, ...] = ()) -> WeightSource:
        desk = self.desks[peer] = WeightServer(store, [spec.digest for spec in SPECS])

        async def serve(channel: Channel) -> None:
            assert channel.remote.peer is not None
            await desk.answer(channel.remote.peer, channel)

        return await self.serve(peer, serve, digests)

    async def fetch(
        self,
        me: PeerId,
        store: WeightStore,
        *sources: WeightSource,
        limits: FetchLimits = PATIENT,
        specs: Sequence[WeightSpec] = SPECS,
        on_progress: Callable[[int, int], None] = lambda _done, _total: None,
    ) -> dict[PeerId, int]:
        transport = self.network.transport(me)

        @asynccontextmanager
        async def reach(source: WeightSource) -> AsyncIterator[Channel]:
            self.dials.append(source.peer)
            channel = await transport.dial(self.listening[source.peer], expect=PeerId(source.peer), stream="state")
            try:
                yield channel
            finally:
                channel.abort()

        return await fetch(
            specs,
            sources,
            store,
            reach=reach,
            now_s=time.monotonic,
            me=me,
            on_progress=on_progress,
            on_refused=lambda peer, key: self.refused.append((peer, key)),
            limits=limits,
        )


def with_members(tmp_path: Path, body: Callable[[Members], Awaitable[None]]) -> None:
    async def run() -> None:
        await body(Members(tmp_path))

    asyncio.run(run())


def assert_whole(store: WeightStore, specs: Sequence[WeightSpec] = SPECS) -> None:
    for spec in specs:
        assert store.read(spec).data == content(spec.key, spec.shape[0])
    assert not list(store.directory.glob("*.part"))


def test_everything_comes_from_one_source(tmp_path: Path) -> None:
    async def body(members: Members) -> None:
        owner = await members.desk(OWNER, filled(tmp_path / "owner"))
        store, told = WeightStore(tmp_path / "a"), list[tuple[int, int]]()
        counted = await members.fetch(FIRST, store, owner, on_progress=lambda *progress: told.append(progress))
        assert counted == {OWNER: TOTAL_BYTES}
        assert members.desks[OWNER].sent_bytes == {FIRST: TOTAL_BYTES}
        assert_whole(store)
        assert told[0] == (0, TOTAL_BYTES)
        assert told[-1] == (TOTAL_BYTES, TOTAL_BYTES)
        assert told == sorted(told)
        assert await members.fetch(FIRST, WeightStore(tmp_path / "a"), owner) == {}

    with_members(tmp_path, body)


# ------------------------------------------------------------------------------------------------ sources that behave


def test_a_second_member_has_its_weights_from_the_first(tmp_path: Path) -> None:
    async def body(members: Members) -> None:
        owner = await members.desk(OWNER, filled(tmp_path / "owner"))
        stores = {peer: WeightStore(tmp_path / peer[:1]) for peer in (FIRST, SECOND, THIRD)}
        first = await members.desk(FIRST, stores[FIRST])
        await members.fetch(FIRST, stores[FIRST], owner)
        assert await members.fetch(SECOND, stores[SECOND], first, owner) == {FIRST: TOTAL_BYTES}
        assert members.desks[OWNER].sent_bytes == {FIRST: TOTAL_BYTES}
        assert members.desks[FIRST].sent_bytes == {SECOND: TOTAL_BYTES}
        assert_whole(stores[SECOND])
        # Both give to a third, and the owner nothing more.
        second = await members.desk(SECOND, stores[SECOND])
        counted = await members.fetch(THIRD, stores[THIRD], first, second, owner)
        assert sum(counted.values()) == TOTAL_BYTES
        assert counted.keys() == {FIRST, SECOND}
        assert members.desks[OWNER].sent_bytes.total() == TOTAL_BYTES

    with_members(tmp_path, body)


def test_what_a_source_is_said_to_have_is_asked_of_it_alone(tmp_path: Path) -> None:
    async def body(members: Members) -> None:
        owner = await members.desk(OWNER, filled(tmp_path / "owner"))
        first = await members.desk(FIRST, filled(tmp_path / "a", SPECS[2:3]), (SPECS[2].digest,))
        counted = await members.fetch(SECOND, WeightStore(tmp_path / "b"), first, owner)
        assert counted == {FIRST: 3 * MIB, OWNER: TOTAL_BYTES - 3 * MIB}

    with_members(tmp_path, body)


def test_a_member_gives_what_it_has_while_it_fetches_itself(tmp_path: Path) -> None:
    """The first has the embedding but for two pieces; the second takes the rest from it and those from the owner."""

    async def body(members: Members) -> None:
        embed, data = SPECS[0], memoryview(content(SPECS[0].key, SPECS[0].shape[0]))
        owner = await members.desk(OWNER, filled(tmp_path / "owner"))
        half = WeightStore(tmp_path / "a")
        assert half.put(embed, 0, data[: 4 * MIB]) == 4
        assert half.put(embed, 6, data[6 * MIB :]) == 4
        first = await members.desk(FIRST, half)
        store = WeightStore(tmp_path / "b")
        counted = await members.fetch(SECOND, store, first, owner, specs=[embed])
        assert_whole(store, [embed])
        # What lies in one ask with the lacking pieces may come from the owner as well.
        assert counted[FIRST] >= 5 * MIB
        assert counted[FIRST] + counted[OWNER] == embed.shape[0]

    with_members(tmp_path, body)


@pytest.mark.slow
def test_two_that_fetch_at_the_same_time_take_from_each_other(tmp_path: Path) -> None:
    async def body(members: Members) -> None:
        specs = [described(f"layer {number}", 2 * MIB) for number in range(12)]
        holder = WeightServer(filled(tmp_path / "owner", specs), [spec.digest for spec in specs])

        async def serve(channel: Channel) -> None:
            await holder.answer(PeerId(str(channel.remote.peer)), channel)

        owner = await members.serve(OWNER, serve)
        stores = {peer: WeightStore(tmp_path / peer[:1]) for peer in (FIRST, SECOND)}
        sources = {peer: await members.desk(peer, store) for peer, store in stores.items()}
        for desk in members.desks.values():
            desk.allow(spec.digest for spec in specs)
        await asyncio.gather(
            members.fetch(FIRST, stores[FIRST], sources[SECOND], owner, specs=specs),
            members.fetch(SECOND, stores[SECOND], sources[FIRST], owner, specs=specs),
        )
        for store in stores.values():
            assert_whole(store, specs)
        assert holder.sent_bytes.total() < 1.7 * 24 * MIB  # alone each would have taken all of it

    with_members(tmp_path, body)


# ------------------------------------------------------------------------------------------------- sources that don't


def pieces(ask: wire.WeightAsk, data: bytes, dtype: str = "uint8") -> tuple[wire.WeightPieces, tuple[HostTensor, ...]]:
    tensor = host_tensor(dtype, (len(data) // ITEMSIZE_BYTES[dtype],), data)
    message = wire.WeightPieces(digest=ask.digest, first=ask.first, tensors=(describe("bytes", tensor),))
    return message, (tensor,)


def right(ask: wire.WeightAsk) -> bytes:
    spec = next(spec for spec in SPECS if spec.digest == ask.digest)
    return content(spec.key, spec.shape[0])[ask.first * PIECE_BYTES : (ask.first + ask.count) * PIECE_BYTES]


def answering(
    answer: Callable[[wire.WeightAsk], tuple[wire.Message, tuple[HostTensor, ...]] | None], pongs: bool = True
) -> Serve:
    """A source that answers each ask so; None ends the connection."""

    async def serve(channel: Channel) -> None:
        while True:
            message = (await channel.receive()).message
            if isinstance(message, wire.Ping):
                if pongs:
                    await channel.send(wire.Pong(sequence=message.sequence, sent_at_s=message.sent_at_s))
                continue
            assert isinstance(message, wire.WeightAsk)
            answered = answer(message)
            if answered is None:
                channel.abort()
                return
            await channel.send(*answered)

    async def until_closed(channel: Channel) -> None:
        with suppress(TransportError):
            await serve(channel)

    return until_closed


def test_a_cut_connection_is_made_again_and_nothing_comes_twice(tmp_path: Path) -> None:
    async def body(members: Members) -> None:
        asked: list[wire.WeightAsk] = []

        def cut_each_third(ask: wire.WeightAsk) -> tuple[wire.Message, tuple[HostTensor, ...]] | None:
            asked.append(ask)
            return None if len(asked) % 3 == 0 else pieces(ask, right(ask))

        owner = await members.serve(OWNER, answering(cut_each_third))
        store = WeightStore(tmp_path / "a")
        assert await members.fetch(FIRST, store, owner) == {OWNER: TOTAL_BYTES}
        assert_whole(store)
        assert len(members.dials) > 1

    with_members(tmp_path, body)


@pytest.mark.slow
@pytest.mark.parametrize("answers", range(1, 5))
def test_a_download_killed_at_any_point_goes_on(tmp_path: Path, answers: int) -> None:
    async def body(members: Members) -> None:
        owner = await members.desk(OWNER, filled(tmp_path / "owner"))
        told: list[int] = []

        def watch(done: int, _total: int) -> None:
            told.append(done)
            if len(told) > answers:
                fetching.cancel()

        one_by_one = replace(PATIENT, asks=1)  # nothing arrives between what is told and the end
        first = members.fetch(FIRST, WeightStore(tmp_path / "a"), owner, on_progress=watch, limits=one_by_one)
        fetching = asyncio.create_task(first)
        with pytest.raises(asyncio.CancelledError):
            await fetching
        store = WeightStore(tmp_path / "a")
        counted = await members.fetch(FIRST, store, owner)
        assert counted == {OWNER: TOTAL_BYTES - told[-1]}
        assert_whole(store)

    with_members(tmp_path, body)


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.slow
@pytest.mark.parametrize(
    "corrupt",
    [
        lambda ask: pieces(ask, flipped(right(ask), len(right(ask)) - 1)),
        lambda ask: pieces(ask, flipped(right(ask), 0)),
        lambda ask: pieces(ask, right(ask)[:-1]),
        lambda ask: pieces(ask, right(ask) + b"x"),
        lambda ask: pieces(ask, right(ask)[:1] * 5 * MIB),
        lambda ask: pieces(ask, b""),
    ],
    ids=["last bit", "first bit", "too short", "too long", "too many", "empty"],
)
def test_wrong_bytes_are_refused_and_their_sender_named(
    tmp_path: Path, corrupt: Callable[[wire.WeightAsk], tuple[wire.Message, tuple[HostTensor, ...]]]
) -> None:
    async def body(members: Members) -> None:
        owner = await members.desk(OWNER, filled(tmp_path / "owner"))
        faulty_peer = await members.serve(FIRST, answering(corrupt))
        store = WeightStore(tmp_path / "b")
        counted = await members.fetch(SECOND, store, faulty_peer, owner)
        assert_whole(store)
        assert sum(counted.values()) == TOTAL_BYTES
        assert [peer for peer, _ in members.refused] == [FIRST]
        assert members.refused[0][1] in {spec.key for spec in SPECS}
        assert members.dials.count(FIRST) == 1, "it is asked for nothing more"

    with_members(tmp_path, body)


def test_a_damaged_file_of_a_member_is_found_out(tmp_path: Path) -> None:
    async def body(members: Members) -> None:
        owner = await members.desk(OWNER, filled(tmp_path / "owner"))
        damaged = filled(tmp_path / "a")
        with (tmp_path / "a" / SPECS[0].digest.hex()).open("r+b") as handle:
            handle.seek(5 * MIB + 7)
            handle.write(b"rot")
        first = await members.desk(FIRST, damaged)
        store = WeightStore(tmp_path / "b")
        await members.fetch(SECOND, store, first, owner)
        assert_whole(store)
        assert members.refused == [(FIRST, "embed")]

    with_members(tmp_path, body)


@pytest.mark.parametrize("pongs", [True, False], ids=["alive", "frozen"])
def test_nobody_waits_for_a_source_that_says_nothing(tmp_path: Path, pongs: bool) -> None:
    async def body(members: Members) -> None:
        async def mute(channel: Channel) -> None:
            with suppress(TransportError):
                while True:
                    message = (await channel.receive()).message
                    if pongs and isinstance(message, wire.Ping):
                        await channel.send(wire.Pong(sequence=message.sequence, sent_at_s=message.sent_at_s))

        owner = await members.desk(OWNER, filled(tmp_path / "owner"))
        silent = await members.serve(FIRST, mute)
        store = WeightStore(tmp_path / "b")
        assert await members.fetch(SECOND, store, silent, owner, limits=QUICK) == {OWNER: TOTAL_BYTES}
        assert_whole(store)

    with_members(tmp_path, body)


@pytest.mark.slow
def test_what_can_not_be_had_is_named_with_everybody_asked(tmp_path: Path) -> None:
    async def body(members: Members) -> None:
        partly = await members.desk(OWNER, filled(tmp_path / "owner", SPECS[:2]))
        gone = WeightSource(peer=FIRST)
        members.listening[FIRST] = ("memory://nowhere:1",)
        faulty_peer = await members.serve(SECOND, answering(lambda ask: pieces(ask, bytes(len(right(ask))))))
        store = WeightStore(tmp_path / "c")
        await members.fetch(THIRD, store, partly, specs=SPECS[:2])
        with pytest.raises(ExecutionError) as told:
            await members.fetch(THIRD, store, gone, faulty_peer, partly, limits=HOPELESS)
        said = str(told.value)
        assert "1 of 4 tensors could not be fetched, the first is mlp: 3.15 MB are missing" in said
        assert "peer aaaaaaaa (no answer from memory://nowhere:1)" in said
        assert "peer bbbbbbbb (peer bbbbbbbb sent wrong bytes of " in said
        assert "peer oooooooo (it does not have mlp)" in said
        assert "What has arrived is kept" in said
        owner = await members.desk(OWNER, filled(tmp_path / "owner"))
        assert await members.fetch(THIRD, store, owner) == {OWNER: 3 * MIB}
        with pytest.raises(ExecutionError, match="sources asked: none"):
            await members.fetch(THIRD, WeightStore(tmp_path / "d"))

    with_members(tmp_path, body)


@pytest.mark.parametrize("answer", [wire.Done(), wire.Refused(code="busy", reason="full")], ids=["other", "refused"])
def test_a_source_that_breaks_the_protocol_is_left(tmp_path: Path, answer: wire.Message) -> None:
    async def body(members: Members) -> None:
        owner = await members.desk(OWNER, filled(tmp_path / "owner"))
        odd = await members.serve(FIRST, answering(lambda _ask: (answer, ())))
        assert await members.fetch(SECOND, WeightStore(tmp_path / "b"), odd, owner) == {OWNER: TOTAL_BYTES}
        assert not members.refused

    with_members(tmp_path, body)


def test_a_full_disk_ends_the_fetch_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(members: Members) -> None:
        owner = await members.desk(OWNER, filled(tmp_path / "owner"))
        store = WeightStore(tmp_path / "a")

        def full(_descriptor: int, _data: memoryview) -> int:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr("fusionai.storage.weight_part.os.write", full)
            with pytest.raises(StorageError, match=r"no space left on the disk of .*Free some space"):
                await members.fetch(FIRST, store, owner)
        await members.fetch(FIRST, store, owner)
        assert_whole(store)

    with_members(tmp_path, body)


def test_too_little_room_is_told_before_anything_is_asked(tmp_path: Path) -> None:
    async def body(members: Members) -> None:
        owner = await members.desk(OWNER, filled(tmp_path / "owner"))
        with pytest.raises(StorageError, match=r"no room for 12.6 MB more of weights"):
            await members.fetch(FIRST, WeightStore(tmp_path / "a", 4 * MIB), owner)
        assert members.desks[OWNER].sent_bytes.total() == 0

    with_members(tmp_path, body)


# ------------------------------------------------------------------------------------------------------ hostile asks


async def ask_at(members: Members, source: WeightSource, *messages: wire.Message) -> list[wire.Message]:
    channel = await members.network.transport(THIRD).dial(members.listening[source.peer], expect=OWNER, stream="state")
    answers: list[wire.Message] = []
    with suppress(TransportError):
        for message in messages:
            await channel.send(message)
        for _ in messages:
            async with asyncio.timeout(CEILING_S):
                answers.append((await channel.receive()).message)
    channel.abort()
    return answers


def test_only_what_belongs_to_the_job_is_given(tmp_path: Path) -> None:
    async def body(members: Members) -> None:
        foreign = described("another job's", 100)
        owner = await members.desk(OWNER, filled(tmp_path / "owner", [*SPECS, foreign]))
        norm = SPECS[1].digest
        answers = await ask_at(
            members,
            owner,
            wire.WeightAsk(digest=foreign.digest, first=0, count=1),
            wire.WeightAsk(digest=bytes(32), first=0, count=1),
            wire.WeightAsk(digest=norm, first=1, count=1),
            wire.WeightAsk(digest=norm, first=2**62, count=64),
            wire.WeightAsk(digest=norm, first=0, count=64),
            wire.WeightAsk(digest=SPECS[0].digest, first=0, count=64),
        )
        sizes = [sum(header.shape[0] for header in getattr(answer, "tensors", ())) for answer in answers]
        assert sizes == [0, 0, 0, 0, 300, 4 * MIB]

    with_members(tmp_path, body)


def test_whoever_breaks_the_protocol_is_shown_out(tmp_path: Path) -> None:
    async def body(members: Members) -> None:
        owner = await members.desk(OWNER, filled(tmp_path / "owner"))
        ask = wire.WeightAsk(digest=SPECS[0].digest, first=0, count=4)
        assert await ask_at(members, owner, wire.Done()) == []
        assert len(await ask_at(members, owner, *[ask] * 200)) < 200
        assert await members.fetch(FIRST, WeightStore(tmp_path / "a"), owner) == {OWNER: TOTAL_BYTES}

    with_members(tmp_path, body)


def test_who_does_not_read_holds_up_nobody_else(tmp_path: Path) -> None:
    async def body(members: Members) -> None:
        desk = WeightServer(filled(tmp_path / "owner"), [spec.digest for spec in SPECS], patience_s=1.0)
        ended = asyncio.Event()

        async def serve(channel: Channel) -> None:
            peer = PeerId(str(channel.remote.peer))
            await desk.answer(peer, channel)
            if peer == THIRD:
                ended.set()

        owner = await members.serve(OWNER, serve)
        greedy = await members.network.transport(THIRD).dial(members.listening[OWNER], expect=OWNER, stream="state")
        for _ in range(8):
            await greedy.send(wire.WeightAsk(digest=SPECS[0].digest, first=0, count=4))
        assert await members.fetch(FIRST, WeightStore(tmp_path / "a"), owner) == {OWNER: TOTAL_BYTES}
        async with asyncio.timeout(CEILING_S):
            await ended.wait()
        assert desk.sent_bytes[THIRD] < 32 * MIB

    with_members(tmp_path, body)


@pytest.mark.parametrize("turns", range(4))
def test_a_connection_that_ends_and_is_given_up_at_the_same_time_leaves_its_place(turns: int, tmp_path: Path) -> None:
    """A member that dies ends all its connections: whoever sees the first of them end gives up the others."""

    async def body(members: Members) -> None:
        desk = WeightServer(filled(tmp_path / "owner"), [spec.digest for spec in SPECS])
        theirs: asyncio.Queue[Channel] = asyncio.Queue()

        async def member(channel: Channel) -> None:
            theirs.put_nowait(channel)
            await asyncio.Event().wait()

        await members.serve(FIRST, member)
        for _ in range(MAX_CONNECTIONS + 1):
            mine = await members.network.transport(OWNER).dial(members.listening[FIRST], expect=FIRST, stream="state")
            answering = asyncio.create_task(desk.answer(FIRST, mine))
            other = await theirs.get()
            await asyncio.sleep(0)
            assert not answering.done(), "nobody else is there, so there is a place"
            other.abort()
            for _ in range(turns):
                await asyncio.sleep(0)
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)

    with_members(tmp_path, body)


# ---------------------------------------------------------------------------------------------- the owner's connection


def test_members_ask_the_owner_on_the_connection_it_made(tmp_path: Path) -> None:
    """One fetch after the other, the first of them cancelled with answers still on their way."""

    async def body(members: Members) -> None:
        desk = WeightServer(filled(tmp_path / "owner"), [spec.digest for spec in SPECS])
        inlets: asyncio.Queue[WeightInlet] = asyncio.Queue()

        async def accept(channel: Channel) -> None:
            inlet = WeightInlet(channel)
            inlets.put_nowait(inlet)
            await inlet.serve()

        listener = await members.network.transport(FIRST).listen(accept, host="a", port=0)
        driver = await members.network.transport(OWNER).dial(listener.addresses, expect=FIRST, stream="state")
        giving = asyncio.create_task(desk.answer(FIRST, driver))
        inlet = await inlets.get()

        @asynccontextmanager
        async def reach(_source: WeightSource) -> AsyncIterator[Channel]:
            yield inlet

        store = WeightStore(tmp_path / "a")
        begun = asyncio.Event()

        def fetching(specs: Sequence[WeightSpec]) -> Awaitable[dict[PeerId, int]]:
            return fetch(
                specs,
                [WeightSource(peer=OWNER)],
                store,
                reach=reach,
                now_s=time.monotonic,
                on_progress=lambda done, _total: begun.set() if done else None,
                limits=PATIENT,
            )

        first = asyncio.ensure_future(fetching(SPECS))
        await begun.wait()
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await fetching(SPECS[:2])
        await fetching(SPECS)
        assert_whole(store)
        driver.abort()
        await giving
        with pytest.raises(
            ExecutionError, match=r"sources asked: peer oooooooo \(the channel on stream state is closed"
        ):
            await fetching([described("more", 10)])

    with_members(tmp_path, body)


# ------------------------------------------------------------------------------------------------------------- memory


@pytest.mark.slow
def test_memory_stays_flat(tmp_path: Path) -> None:
    big = described("big", 96 * MIB)

    async def body(members: Members) -> None:
        desk = WeightServer(filled(tmp_path / "owner", [big]), [big.digest])

        async def serve(channel: Channel) -> None:
            await desk.answer(SECOND, channel)

        owner = await members.serve(OWNER, serve)
        content.cache_clear()
        tracemalloc.start()
        await members.fetch(FIRST, WeightStore(tmp_path / "a"), owner, specs=[big], limits=FetchLimits())
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak_bytes < 64 * MIB, "both sides together"

    with_members(tmp_path, body)
