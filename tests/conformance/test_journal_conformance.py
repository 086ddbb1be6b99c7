"""What every journal of a pool promises, on every engine: files, PostgreSQL, etcd. The servers are real ones.

Rows are written once or not at all, whatever happens to the connection, to the server, or to the broker."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from urllib.parse import quote

import httpx
import msgspec
import pytest

from fusionai.broker.engines import engine_journal as engine_journals
from fusionai.broker.engines import etcd_client, postgresql
from fusionai.broker.engines.engine_journal import EngineJournal
from fusionai.broker.engines.etcd_client import EtcdClient, EtcdFull, text
from fusionai.broker.engines.interface import JournalHeld, JournalInDoubt, JournalTaken, PoolJournal
from fusionai.broker.engines.locations import engine_at
from fusionai.broker.journal import Journal
from fusionai.coordination.broker.events import Fact, JobNoted, PlanMinted
from fusionai.primitives.errors import StorageError, UsageError
from fusionai.primitives.ids import PeerId
from harness.engine_servers import PASSWORD, EngineServer, EtcdServer, PostgresServer, etcd_cluster, why_not
from harness.fault_proxy import TO_CLIENT, TO_TARGET, Direction, FaultProxy

pytestmark = pytest.mark.slow

KEY = b"k" * 32
ONE, OTHER = PeerId("one"), PeerId("other")
IMPATIENT_S = 0.4
"""Limit for an operation where a silent server is the subject."""


def note(number: int) -> JobNoted:
    return JobNoted(at_s=float(number), job="job-1", text=f"note {number}")


def plan(number: int, size: int) -> PlanMinted:
    """A fact of this size: random bytes, which no server can compress."""
    data = random.Random(number).randbytes(size)
    return PlanMinted(at_s=float(number), job="job-1", version=number, plan=data, members=())


def notes(count: int) -> tuple[JobNoted, ...]:
    return tuple(note(number) for number in range(count))


class Stand:
    """One journal, which brokers open."""

    def __init__(self, name: str, directory: Path, server: EngineServer | None) -> None:
        self.name = name
        self.server = server
        self._file = directory / "journal.sqlite"
        self._opened = ExitStack()

    @property
    def running(self) -> EngineServer:
        assert self.server is not None
        return self.server

    def open(self, identity: PeerId = ONE, *, port: int | None = None, pool: str = "home") -> PoolJournal:
        if self.server is None:
            journal: PoolJournal = Journal.open(self._file, pool)
        else:
            journal = self.engine(identity, port=port, pool=pool)
        self._opened.callback(lambda: _closed(journal))
        return journal

    def engine(self, identity: PeerId = ONE, *, port: int | None = None, pool: str = "home") -> EngineJournal:
        url = self.running.url(self.name, port)
        journal = EngineJournal.open(engine_at(url), pool, identity, lambda _: KEY)
        self._opened.callback(lambda: _closed(journal))
        return journal

    def close(self) -> None:
        self._opened.close()


def _closed(journal: PoolJournal) -> None:
    if isinstance(journal, EngineJournal):
        journal.close()


@pytest.fixture(scope="module", params=[PostgresServer, EtcdServer], ids=["postgresql", "etcd"])
def server(request: pytest.FixtureRequest) -> Iterator[EngineServer]:
    if reason := why_not(request.param):
        pytest.skip(reason)
    with request.param() as running:
        yield running


ON_POSTGRESQL = pytest.mark.parametrize("server", [PostgresServer], ids=["postgresql"], indirect=True)
ON_ETCD = pytest.mark.parametrize("server", [EtcdServer], ids=["etcd"], indirect=True)


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    return f"t{abs(hash(request.node.name)) % 10**12}"


@pytest.fixture
def stand(server: EngineServer, name: str, tmp_path: Path) -> Iterator[Stand]:
    """On an engine."""
    with closing(Stand(name, tmp_path, server)) as stand:
        yield stand


@pytest.fixture
def files(tmp_path: Path) -> Stand:
    return Stand("files", tmp_path, None)


def everywhere(promise: Callable[[Stand], None]) -> tuple[Callable[[Stand], None], Callable[[Stand], None]]:
    """The promise as two tests: in files, and on each engine."""

    def in_files(files: Stand) -> None:
        promise(files)

    def on_engines(stand: Stand) -> None:
        promise(stand)

    return in_files, on_engines


def content(stand: Stand) -> tuple[int, tuple[Fact, ...]]:
    """What a broker that starts now finds."""
    with closing(stand.open()) as journal:
        found = journal.load()
        assert found.state == b""
        return found.sequence, found.facts


def reopens(stand: Stand) -> None:
    with closing(stand.open()) as journal:
        assert (journal.load().sequence, journal.load().facts, journal.term) == (0, (), 1)
        assert journal.append(0, []) == 0
        assert journal.append(0, [note(0), note(1)]) == 2
        assert journal.append(2, [plan(2, 3_000_000)]) == 3
    with closing(stand.open()) as journal:
        assert journal.term == 2
        assert journal.load().facts == (note(0), note(1), plan(2, 3_000_000))
        assert journal.append(3, [note(3)]) == 4
    assert content(stand) == (4, (note(0), note(1), plan(2, 3_000_000), note(3)))


test_facts_come_back_in_order_from_files, test_facts_come_back_in_order = everywhere(reopens)


def refuses_gaps(stand: Stand) -> None:
    with closing(stand.open()) as journal:
        journal.append(0, [note(0)])
        for wrong in (0, 2):
            with pytest.raises(JournalTaken):
                journal.append(wrong, [note(9)])
    assert content(stand) == (1, (note(0),))


test_another_place_in_the_order_is_refused_by_files, test_another_place_in_the_order_is_refused = everywhere(
    refuses_gaps
)


def compacts(stand: Stand) -> None:
    with closing(stand.open()) as journal:
        journal.compact(b"of nothing")
        journal.append(0, notes(5))
        state = b"s" * 2_000_000
        journal.compact(state)
        assert (journal.load().sequence, journal.load().state, journal.load().facts) == (5, state, ())
        journal.append(5, [note(5)])
        journal.compact(b"a later one")
        journal.append(6, [note(6)])
    with closing(stand.open()) as journal:
        found = journal.load()
        assert (found.sequence, found.state, found.facts) == (7, b"a later one", (note(6),))
        assert not journal.compaction_due


test_files_start_anew_with_a_state, test_a_journal_starts_anew_with_a_state = everywhere(compacts)


def belongs_to_its_pool(stand: Stand) -> None:
    with closing(stand.open()) as journal:
        journal.append(0, [note(0)])
    with pytest.raises(UsageError, match="expected the journal of pool 'away'"):
        stand.open(pool="away")
    assert content(stand) == (1, (note(0),))


test_files_of_another_pool_are_refused, test_another_pools_journal_is_refused = everywhere(belongs_to_its_pool)


def ends_for_good(stand: Stand) -> None:
    journal = stand.open()
    journal.append(0, [note(0)])
    journal.retire("elsewhere")
    if stand.server is None:
        assert content(stand) == (0, ())  # the files have other names
        return
    with pytest.raises(UsageError, match="was moved to elsewhere"):
        stand.open()


test_files_of_a_moved_pool_are_renamed, test_a_moved_journal_is_refused = everywhere(ends_for_good)


def test_two_brokers_on_one_home_are_refused(files: Stand):
    with closing(files.open()), pytest.raises(UsageError, match="another broker is running"):
        files.open()


def test_a_second_broker_waits_for_the_lease_and_a_clean_end_gives_it_at_once(stand: Stand):
    first = stand.engine()
    first.append(0, [note(0)])
    with pytest.raises(JournalHeld, match="another broker") as held:
        stand.engine(OTHER)
    assert 0 < held.value.lasts_s <= engine_journals.LEASE_S
    first.close()
    second = stand.engine(OTHER)
    assert second.append(1, [note(1)]) == 2


def test_a_lease_ends_by_itself_and_a_renewed_one_does_not(stand: Stand, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engine_journals, "LEASE_S", 2.0)
    first = stand.engine()
    first.append(0, [note(0)])
    # etcd rounds leases up to what its election timeout needs; both must end without a word from `first`.
    second = None
    while second is None:
        try:
            second = stand.engine(OTHER)
        except JournalHeld:
            continue
    assert second.append(1, [note(1)]) == 2
    for late in (lambda: first.append(1, [note(9)]), first.renew, lambda: first.compact(b"late")):
        with pytest.raises(JournalTaken, match="another broker has taken over"):
            late()
    second.renew()
    assert second.load().facts == notes(2)


def test_the_same_broker_started_again_need_not_wait_and_the_old_process_is_refused(stand: Stand):
    first, again = stand.engine(), stand.engine()
    assert again.term == first.term + 1
    again.append(0, [note(0)])
    with pytest.raises(JournalTaken):
        first.append(0, [note(9)])
    assert again.load().facts == (note(0),)


def test_of_two_brokers_that_append_at_once_one_wins(stand: Stand):
    """The older one does not know yet that its term is over; both write to the same place in the order."""
    first, again = stand.engine(), stand.engine()
    ready, outcomes = threading.Barrier(2), dict[str, object]()

    def write(who: str, journal: EngineJournal) -> None:
        ready.wait()
        try:
            outcomes[who] = journal.append(0, [note(1 if who == "first" else 2)])
        except JournalTaken as error:
            outcomes[who] = type(error)

    threads = [threading.Thread(target=write, args=pair) for pair in (("first", first), ("again", again))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == {"first": JournalTaken, "again": 1}
    assert again.load().facts == (note(2),)


def test_a_broker_without_the_pools_key_can_not_take_it_over(stand: Stand):
    stand.engine().close()
    url = stand.running.url(stand.name)
    with pytest.raises(UsageError, match="has not the key of pool 'home'"):
        EngineJournal.open(engine_at(url), "home", OTHER, lambda _: b"")


# ------------------------------------------------------------------------------------------- lost answers, outages


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (postgresql, etcd_client):
        monkeypatch.setattr(module, "OPERATION_S", IMPATIENT_S)
        monkeypatch.setattr(module, "CONNECT_S", 1.0)


@pytest.fixture
def proxy(server: EngineServer) -> Iterator[FaultProxy]:
    with FaultProxy(server.port) as proxy:
        yield proxy


@pytest.mark.parametrize("direction", [TO_TARGET, TO_CLIENT], ids=["request lost", "answer lost"])
@pytest.mark.parametrize("reset", [True, False], ids=["reset", "closed"])
def test_a_connection_cut_during_an_append_writes_it_once(
    stand: Stand, proxy: FaultProxy, direction: Direction, reset: bool
):
    """Whether the request or the answer was lost: the broker finds out on a new connection, and writes what is not
    there."""
    journal = stand.engine(port=proxy.port)
    journal.append(0, [note(0)])
    link = proxy.links[-1]
    before = link.traffic[direction].arrived_bytes
    link.swallow(direction)

    def strike() -> None:
        proxy.wait_until(lambda: link.traffic[direction].arrived_bytes > before)
        link.cut(reset=reset)

    striker = threading.Thread(target=strike)
    striker.start()
    assert journal.append(1, [note(1), note(2)]) == 3
    striker.join()
    assert journal.append(3, [note(3)]) == 4
    assert journal.load().facts == notes(4)
    assert journal.term == 2, "a new connection is a new term"


@pytest.mark.parametrize("direction", [TO_TARGET, TO_CLIENT], ids=["request lost", "answer lost"])
def test_an_append_in_doubt_is_neither_done_nor_failed_until_the_engine_answers(
    stand: Stand, proxy: FaultProxy, direction: Direction, impatient: None
):
    journal = stand.engine(port=proxy.port)
    journal.append(0, [note(0)])
    proxy.links[-1].swallow(direction)
    proxy.refuse()
    with pytest.raises(JournalInDoubt, match="not known yet"):
        journal.append(1, [note(1)])
    assert journal.outage
    for refused in (lambda: journal.append(1, [note(2)]), lambda: journal.compact(b"s"), journal.renew):
        with pytest.raises(StorageError, match="the pool's journal can't be used now"):
            refused()
    with pytest.raises(StorageError, match="can't be reached"):
        journal.recover()
    proxy.heal()
    written = journal.recover()
    assert written is (direction is TO_CLIENT)
    assert journal.outage == ""
    assert journal.append(2 if written else 1, [note(2)]) == (3 if written else 2)
    assert journal.load().facts == (notes(3) if written else (note(0), note(2)))


def test_a_request_that_arrives_late_is_not_written_a_second_time(stand: Stand, proxy: FaultProxy, impatient: None):
    journal = stand.engine(port=proxy.port)
    journal.append(0, [note(0)])
    slow = proxy.links[-1]
    slow.hold(TO_TARGET)
    assert journal.append(1, [note(1)]) == 2, "on a new connection"
    held = slow.traffic[TO_TARGET]
    assert held.arrived_bytes > held.passed_bytes
    slow.heal()
    proxy.wait_until(lambda: slow not in proxy.links or slow.traffic[TO_TARGET].passed_bytes == held.arrived_bytes)
    assert journal.append(2, [note(2)]) == 3
    assert journal.load().facts == notes(3)


def test_a_server_killed_and_started_again_has_everything_acknowledged(stand: Stand, impatient: None):
    journal = stand.engine()
    journal.append(0, notes(3))
    journal.compact(b"state")
    journal.append(3, [note(3)])
    stand.running.kill()
    try:
        with pytest.raises(StorageError):
            journal.append(4, [note(4)])
        with pytest.raises(StorageError, match="can't be reached"):
            stand.engine()
    finally:
        stand.running.start()
    assert journal.recover() in (None, False)
    assert journal.append(4, [note(4)]) == 5
    found = journal.load()
    assert (found.state, found.facts) == (b"state", (note(3), note(4)))


def test_a_suspended_server_holds_a_broker_up_for_a_limited_time(stand: Stand, impatient: None):
    journal = stand.engine()
    journal.append(0, [note(0)])
    stand.running.suspend()
    try:
        with pytest.raises(JournalInDoubt, match=r"no answer|gave no"):
            journal.append(1, [note(1)])
    finally:
        stand.running.resume()
    written = None
    while journal.outage:
        try:
            written = journal.recover()
        except StorageError:
            continue
    assert isinstance(written, bool)
    assert journal.load().facts == notes(2 if written else 1)


def test_a_slow_server_is_waited_for(stand: Stand, proxy: FaultProxy):
    journal = stand.engine(port=proxy.port)
    proxy.delay(0.05)
    assert journal.append(0, notes(2)) == 2
    proxy.throttle(400_000)
    assert journal.append(2, [plan(2, 150_000)]) == 3
    proxy.heal()
    assert (journal.term, journal.load().facts) == (1, (*notes(2), plan(2, 150_000)))


# --------------------------------------------------------------------------------------------------------- damage


def damage_postgres(stand: Stand, statement: str) -> None:
    import psycopg

    url = stand.running.url(stand.name).partition("?")[0]
    with psycopg.connect(url, autocommit=True, options=f"-c search_path={stand.name}") as connection:
        connection.execute(statement)  # pyright: ignore[reportArgumentType, reportCallIssue]


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE journal SET fact = (SELECT fact FROM journal WHERE sequence = 1) WHERE sequence = 3",
        "UPDATE journal SET term = 7 WHERE sequence = 3",
        "UPDATE journal SET fact = decode(repeat('00', 34000000), 'hex') WHERE sequence = 3",
        "DELETE FROM journal WHERE sequence = 5",
        "DELETE FROM journal",
        "UPDATE base SET chain = '\\x00'",
        "DELETE FROM base",
        "UPDATE head SET chain = '\\x00'",
        "UPDATE head SET sequence = 4",
    ],
)
@ON_POSTGRESQL
def test_damaged_rows_in_postgresql_are_refused(stand: Stand, statement: str):
    with closing(stand.engine()) as journal:
        journal.append(0, notes(3))
        journal.compact(b"state")
        journal.append(3, notes(5)[3:])
        journal.append(5, [note(5)])
    damage_postgres(stand, statement.replace("= 1)", "= 4)").replace("sequence = 3", "sequence = 5"))
    with closing(stand.engine()) as journal, pytest.raises(StorageError, match="is damaged") as damaged:
        journal.load()
    assert damaged.value.hint is not None
    assert "Restore the database from a backup" in damaged.value.hint


def put(stand: Stand, key: str, value: bytes | None) -> None:
    """Put or delete a key of etcd, as another program could."""
    path, named = ("put", {"value": text(value)}) if value is not None else ("deleterange", {})
    url = f"http://127.0.0.1:{stand.running.port}/v3/kv/{path}"
    httpx.post(url, json={"key": text(f"{stand.name}/{key}".encode()), **named}).raise_for_status()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (f"rows/{4:020d}", None),
        (f"rows/{6:020d}", None),
        (f"rows/{6:020d}", b"no row"),
        (f"rows/{6:020d}", msgspec.msgpack.encode((2**60, b"d" * 32, b""))),
        (f"rows/{6:020d}", msgspec.msgpack.encode((1, b"d" * 32, b"x"))),
        ("base", None),
        ("base", b""),
    ],
)
@ON_ETCD
def test_damaged_rows_in_etcd_are_refused(stand: Stand, key: str, value: bytes | None):
    with closing(stand.engine()) as journal:
        journal.append(0, notes(3))
        journal.compact(b"state")
        journal.append(3, notes(5)[3:])
        journal.append(5, [note(5)])
    put(stand, key, value)
    with closing(stand.engine()) as journal, pytest.raises(StorageError, match="is damaged"):
        journal.load()


@ON_ETCD
def test_a_part_of_a_large_append_that_is_missing_is_found(stand: Stand):
    with closing(stand.engine()) as journal:
        journal.append(0, [plan(0, 2_000_000)])
        digest = _digest_of(stand)
    put(stand, f"parts/{digest}/{1:08d}", None)
    with closing(stand.engine()) as journal, pytest.raises(StorageError, match="is damaged"):
        journal.load()


def _digest_of(stand: Stand) -> str:
    first = f"{stand.name}/parts/".encode()
    client = etcd_client.EtcdClient(etcd_client.EtcdAddress(members=(f"127.0.0.1:{stand.running.port}",)), "etcd")
    with closing(client):
        client.connect(first)
        keys, _ = client.range(first, etcd_client.prefix_end(first), limit=1, keys_only=True)
    return keys[0].key.split(b"/")[2].decode()


@ON_ETCD
def test_parts_of_old_states_are_deleted(stand: Stand):
    journal = stand.engine()
    journal.append(0, [plan(0, 1_000_000)])
    first = _digest_of(stand)
    journal.compact(b"s" * 1_000_000)
    assert _digest_of(stand) != first
    assert journal.load().state == b"s" * 1_000_000


@pytest.mark.parametrize("connection", ["the same", "a new one"])
def test_a_journal_that_was_set_back_is_noticed(stand: Stand, proxy: FaultProxy, connection: str):
    """A server restored from a backup, or a standby that had not got everything, ends before what was acknowledged."""
    journal = stand.engine(port=proxy.port)
    journal.append(0, notes(2))
    engine = engine_at(stand.running.url(stand.name))
    engine.connect()
    with closing(engine):
        head = engine.head()
    assert head is not None
    if isinstance(stand.running, EtcdServer):
        put(stand, "head", msgspec.msgpack.encode(msgspec.structs.replace(head, sequence=1)))
    else:
        damage_postgres(stand, "UPDATE head SET sequence = 1")
    if connection == "a new one":
        proxy.links[-1].cut()
    with pytest.raises(JournalTaken, match="set back, or changed by another program"):
        journal.append(2, [note(2)])


# ----------------------------------------------------------------------------------------------------------- full


def test_a_full_etcd_refuses_and_keeps_what_it_has():
    if reason := why_not(EtcdServer):
        pytest.skip(reason)
    with EtcdServer("--quota-backend-bytes", str(4 * 2**20)) as server:
        journal = EngineJournal.open(engine_at(server.url("full")), "home", ONE, lambda _: KEY)
        with closing(journal):
            _fill(journal)


@ON_ETCD
@pytest.mark.parametrize("done", [True, False], ids=["done", "not done"])
def test_etcd_may_have_done_what_it_refuses_because_it_is_full(
    stand: Stand, monkeypatch: pytest.MonkeyPatch, done: bool
):
    """The request that meets the quota first is applied, and answered by "database space exceeded"."""
    journal = stand.engine()
    transact = EtcdClient.transact

    def full(client: EtcdClient, compare, success) -> bool:
        if done:
            transact(client, compare, success)
        raise EtcdFull("etcd is full; what was asked has not been done.")

    with monkeypatch.context() as patched:
        patched.setattr(EtcdClient, "transact", full)
        if done:
            assert journal.append(0, [note(0)]) == 1
        else:
            with pytest.raises(StorageError, match="is full"):
                journal.append(0, [note(0)])
    assert journal.append(int(done), [note(1)]) == 1 + done
    assert journal.load().facts == ((note(0), note(1)) if done else (note(1),))


def test_a_full_postgresql_refuses_and_keeps_what_it_has(postgres_on_a_small_disk: EngineServer):
    journal = EngineJournal.open(engine_at(postgres_on_a_small_disk.url("full")), "home", ONE, lambda _: KEY)
    with closing(journal):
        _fill(journal)


def _fill(journal: EngineJournal) -> None:
    sizes: list[int] = []

    def write() -> None:
        while len(sizes) < 200:
            sizes.append(journal.append(len(sizes), [plan(len(sizes), 300_000)]))

    with pytest.raises(StorageError, match=r"is full .*has not been done") as full:
        write()
    assert not isinstance(full.value, JournalInDoubt | JournalTaken)
    assert 0 < len(sizes) < 200
    assert journal.history().sequence == len(sizes)
    journal.renew()


@pytest.fixture
def postgres_on_a_small_disk(tmp_path: Path) -> Iterator[EngineServer]:
    """The tables are on a file system of 8 MiB, the log is not."""
    import os
    import subprocess

    import psycopg

    if reason := why_not(PostgresServer):
        pytest.skip(reason)
    with PostgresServer() as server:
        place = server.directory / "small"
        place.mkdir()
        small = ["mount", "-t", "tmpfs", "-o", "size=8m,mode=0777", "tmpfs", str(place)]
        if os.geteuid() != 0 or subprocess.run(small, capture_output=True).returncode != 0:
            pytest.skip("no small file system can be mounted here")
        try:
            os.chown(place, *(lambda found: (found.st_uid, found.st_gid))(server.directory.stat()))
            url = server.url("full").partition("?")[0]
            with psycopg.connect(url, autocommit=True) as connection:
                connection.execute(f"CREATE TABLESPACE small LOCATION '{place}'".encode())
                connection.execute("ALTER ROLE broker SET default_tablespace = 'small'")
            yield server
        finally:
            server.kill()
            subprocess.run(["umount", str(place)], check=False, capture_output=True)


# --------------------------------------------------------------------------------------------- TLS and passwords


@pytest.mark.parametrize("kind", [PostgresServer, EtcdServer], ids=["postgresql", "etcd"])
def test_a_server_with_tls_and_passwords(kind: type[PostgresServer] | type[EtcdServer]):
    if reason := why_not(kind):
        pytest.skip(reason)
    with kind(guarded=True) as server:
        url = server.url("guarded")
        with closing(EngineJournal.open(engine_at(url), "home", ONE, lambda _: KEY)) as journal:
            assert PASSWORD not in journal.name
            assert quote(PASSWORD, safe="") not in journal.name
            assert journal.append(0, notes(2)) == 2
        wrong = server.directory / "wrong"
        wrong.write_text("another word")
        for bad in (
            url.replace(quote(PASSWORD, safe=""), "another").replace(str(server.directory / "password"), str(wrong)),
            url.replace("localhost", "127.0.0.2"),
        ):
            with pytest.raises((UsageError, StorageError)) as refused:
                EngineJournal.open(engine_at(bad), "home", ONE, lambda _: KEY)
            assert PASSWORD not in str(refused.value)


# --------------------------------------------------------------------------------------------------------- clusters


def test_a_cluster_goes_on_without_any_one_member():
    if reason := why_not(EtcdServer):
        pytest.skip(reason)
    with etcd_cluster(3) as servers:
        url = f"etcd://{','.join(f'127.0.0.1:{server.port}' for server in servers)}/pool"
        journal = EngineJournal.open(engine_at(url), "home", ONE, lambda _: KEY)
        written = journal.append(0, [note(0)])
        for number, server in enumerate(servers, start=2):
            server.kill()
            while written < number:
                written = go_on(journal, written)
            server.start()
        assert written == 4
        assert journal.load().facts == notes(4)
        for server in servers[:2]:
            server.kill()
        with pytest.raises(StorageError):
            journal.append(4, [note(4)])
        assert journal.outage, "one of three is no majority"
        journal.close()


def go_on(journal: EngineJournal, written: int) -> int:
    """As a broker does: try, and find out what became of it. Returns the last row."""
    try:
        if not journal.outage:
            return journal.append(written, [note(written)])
        return written + (journal.recover() is True)
    except JournalTaken:
        raise
    except StorageError:
        return written


def test_a_promoted_standby_has_everything_acknowledged(impatient: None):
    """PostgreSQL with a synchronous standby: nothing is acknowledged that only one of the two has."""
    if reason := why_not(PostgresServer):
        pytest.skip(reason)
    with PostgresServer() as first, PostgresServer(copied_from=first) as second:
        first.execute("ALTER SYSTEM SET synchronous_standby_names = '*'", "SELECT pg_reload_conf()")
        url = first.url("pool").replace(f":{first.port}/", f":{first.port},127.0.0.1:{second.port}/")
        journal = EngineJournal.open(engine_at(url), "home", ONE, lambda _: KEY)
        written = journal.append(0, notes(2))

        second.suspend()
        with pytest.raises(JournalInDoubt):
            journal.append(written, [note(written)])
        with pytest.raises(StorageError):
            journal.recover()  # what only the first server has does not count as written
        second.resume()
        while journal.outage:
            written = settled(journal, written)
        while written < 4:
            written = go_on(journal, written)
        acknowledged = journal.load().facts

        first.kill()
        with pytest.raises(StorageError):
            journal.append(written, [note(written)])
        with pytest.raises(StorageError):
            journal.recover()  # a standby takes no writes
        second.execute("SELECT pg_promote()")
        while journal.outage:
            written = settled(journal, written)
        assert journal.load().facts[: len(acknowledged)] == acknowledged
        end = journal.append(written, [note(written)])

        # The old server is the first of the URL, and believes that it is still the one that takes writes.
        first.start()
        with pytest.raises(StorageError):
            EngineJournal.open(engine_at(url), "home", ONE, lambda _: KEY)
        assert journal.append(end, [note(end)]) == end + 1
        first.kill()
        with closing(EngineJournal.open(engine_at(url), "home", ONE, lambda _: KEY)) as other:
            assert other.load().sequence == end + 1
            with pytest.raises(JournalTaken):
                journal.append(end + 1, [note(0)])
        journal.close()


def settled(journal: EngineJournal, written: int) -> int:
    """Try to end an outage once. Returns the last row."""
    try:
        return written + (journal.recover() is True)
    except JournalTaken:
        raise
    except StorageError:
        return written
