"""A pool's journal in PostgreSQL: a schema with the tables `head`, `base` and `journal`.

An append is one statement, which is a transaction of its own: it replaces the head if the head is the expected one, and
inserts the rows only then. The statement waits for the lock of the head's row, so that a write of a dead connection has
ended, or no longer fits, when another session has replaced the head. Leases end by the server's clock.

`synchronous_commit` is turned on for the session, and a server with `fsync = off` is refused. Connections go through
psycopg and libpq, so that the URL takes libpq's parameters: several hosts, TLS, a password file.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import msgspec
import psycopg
from psycopg import conninfo, sql
from psycopg.abc import RV, PQGen
from psycopg.rows import TupleRow

from fusionai.broker.engines.interface import (
    CONNECT_S,
    MAX_FACT_BYTES,
    MAX_STATE_BYTES,
    OPERATION_S,
    AnswerLost,
    EngineCopy,
    EngineHead,
    EngineLease,
    EngineUnreachable,
    identity_of,
)
from fusionai.broker.history import Base, PoolHistory, Row
from fusionai.primitives.errors import StorageError, UsageError

_Kind = TypeVar("_Kind", Base, Row, EngineHead)
_PAGE_BYTES: Final = 16 * 2**20
_PAGE_ROWS: Final = 1_000
_MAX_NAME_BYTES: Final = 1_024
_SCHEMA: Final = (
    "CREATE SCHEMA IF NOT EXISTS {schema}",
    """CREATE TABLE IF NOT EXISTS {schema}.journal (sequence bigint PRIMARY KEY, term bigint NOT NULL,
    fact bytea NOT NULL, chain bytea NOT NULL)""",
    """CREATE TABLE IF NOT EXISTS {schema}.base (one int PRIMARY KEY CHECK (one = 1), sequence bigint NOT NULL,
    chain bytea NOT NULL, state bytea NOT NULL, seal bytea NOT NULL)""",
    """CREATE TABLE IF NOT EXISTS {schema}.head (one int PRIMARY KEY CHECK (one = 1), format int NOT NULL,
    pool text NOT NULL, term bigint NOT NULL, sequence bigint NOT NULL, chain bytea NOT NULL, owner text NOT NULL,
    authority bytea NOT NULL, lease_until timestamptz NOT NULL)""",
)
_COLUMNS: Final = "format, pool, term, sequence, chain, owner, authority"
_IS_HEAD: Final = "term = %(term)s AND sequence = %(sequence)s AND chain = %(chain)s AND owner = %(owner)s"
_APPEND: Final = f"""WITH moved AS (UPDATE {{schema}}.head SET sequence = %(to)s, chain = %(to_chain)s
    WHERE {_IS_HEAD} RETURNING one)
    INSERT INTO {{schema}}.journal SELECT r.* FROM moved, unnest(%(sequences)s::bigint[], %(terms)s::bigint[],
    %(facts)s::bytea[], %(chains)s::bytea[]) AS r"""
_TAKE: Final = f"""UPDATE {{schema}}.head SET term = %(new_term)s, owner = %(new_owner)s,
    lease_until = clock_timestamp() + %(lease_s)s * interval '1 second'
    WHERE {_IS_HEAD} AND (lease_until < clock_timestamp() OR split_part(owner, '/', 1) = %(identity)s)"""
_RENEW: Final = """UPDATE {schema}.head SET lease_until = clock_timestamp() + %(lease_s)s * interval '1 second'
    WHERE term = %(term)s AND owner = %(owner)s"""
_BASE: Final = """INSERT INTO {schema}.base VALUES (1, %s, %s, %s, %s) ON CONFLICT (one) DO UPDATE SET
    sequence = excluded.sequence, chain = excluded.chain, state = excluded.state, seal = excluded.seal"""
_UNKNOWN: Final = ("08", "57P", "40003", "58")
"""SQLSTATEs after which a statement may have been done: the connection failed, the server stops."""
_CONFLICT: Final = ("40001", "40P01")
_FULL: Final = ("53100", "53200", "53300", "53400")
_OF_THE_USER: Final = ("28", "3D", "42")
"""A wrong password, an unknown database, a missing right."""


class _TimedConnection(psycopg.Connection[TupleRow]):
    """Gives every operation at most `OPERATION_S`. libpq itself waits for a silent server without limit."""

    def wait(self, gen: PQGen[RV], interval: float = 0.1, *others: Any, **named: Any) -> RV:
        return super().wait(_limited(gen, time.monotonic() + OPERATION_S), interval, *others, **named)


def _limited(gen: PQGen[RV], ends_s: float) -> PQGen[RV]:
    """Return the generator that raises `psycopg.OperationalError` when it is resumed after `ends_s`."""
    try:
        ready = yield next(gen)
        while True:
            if time.monotonic() >= ends_s:
                raise psycopg.OperationalError(f"no answer within {OPERATION_S:g} s")
            ready = yield gen.send(ready)
    except StopIteration as end:
        return end.value


class PostgresEngine:
    """One schema of a PostgreSQL database."""

    def __init__(self, url: str, schema: str, shown: str) -> None:
        """`url`: for libpq. `shown`: the same without secrets."""
        self._url = url
        self._schema = sql.Identifier(schema)
        self._shown = shown
        self._connection: _TimedConnection | None = None

    @property
    def name(self) -> str:
        return self._shown

    @property
    def restoring(self) -> str:
        return (
            "Restore the database from a backup; or name another schema in the URL: the pool is empty then and "
            "everybody joins anew."
        )

    def connect(self) -> None:
        self._drop()
        try:
            found = _TimedConnection.connect(self._url, autocommit=True, connect_timeout=round(CONNECT_S))
        except psycopg.Error as error:
            raise self._not_connected(error) from error
        self._connection = found
        try:
            self._check_durable(found)
        except psycopg.Error as error:
            self._drop()
            raise self._not_connected(error) from error
        except StorageError:
            self._drop()
            raise

    def head(self) -> EngineHead | None:
        with self._operation("read") as connection:
            table = self._sql("{schema}.head").as_string()
            if connection.execute("SELECT to_regclass(%s)", (table,)).fetchone() == (None,):
                return None
            return self._head(connection)

    def lease(self) -> EngineLease | None:
        query = "SELECT owner, extract(epoch FROM lease_until - clock_timestamp())::float8 FROM {schema}.head"
        with self._operation("read") as connection:
            found = connection.execute(self._sql(query)).fetchone()
        return EngineLease(str(found[0]), float(found[1])) if found is not None and found[1] > 0 else None

    def create(self, head: EngineHead, history: PoolHistory) -> bool:
        insert = (
            "INSERT INTO {schema}.head VALUES (1, %s, %s, %s, %s, %s, %s, %s, to_timestamp(0)) ON CONFLICT DO NOTHING"
        )
        with self._operation("created") as connection, connection.transaction():
            # Two brokers that begin at once must not both create the schema.
            connection.execute("SELECT pg_advisory_xact_lock(hashtext(%s))", (self._schema.as_string(),))
            for statement in _SCHEMA:
                connection.execute(self._sql(statement))
            if connection.execute(self._sql(insert), msgspec.structs.astuple(head)).rowcount != 1:
                return False
            connection.execute(self._sql("DELETE FROM {schema}.journal"))
            connection.execute(self._sql(_BASE), msgspec.structs.astuple(history.base))
            with connection.cursor() as cursor:
                rows = [msgspec.structs.astuple(row) for row in history.rows]
                if rows:
                    cursor.executemany(self._sql("INSERT INTO {schema}.journal VALUES (%s, %s, %s, %s)"), rows)
            return True

    def take(self, old: EngineHead, new: EngineHead, lease_s: float) -> bool:
        values = {
            **_named(old),
            "new_term": new.term,
            "new_owner": new.owner,
            "lease_s": lease_s,
            "identity": identity_of(old.owner if lease_s == 0 else new.owner),
        }
        return self._changed(_TAKE, values)

    def append(self, old: EngineHead, new: EngineHead, rows: Sequence[Row]) -> bool:
        values = {
            **_named(old),
            "to": new.sequence,
            "to_chain": new.chain,
            "sequences": [row.sequence for row in rows],
            "terms": [row.term for row in rows],
            "facts": [row.fact for row in rows],
            "chains": [row.chain for row in rows],
        }
        return self._changed(_APPEND, values)

    def rebase(self, head: EngineHead, base: Base) -> bool:
        locked = f"SELECT one FROM {{schema}}.head WHERE {_IS_HEAD} FOR UPDATE"
        with self._operation("compacted") as connection, connection.transaction():
            if connection.execute(self._sql(locked), _named(head)).fetchone() is None:
                return False
            connection.execute(self._sql(_BASE), msgspec.structs.astuple(base))
            connection.execute(self._sql("DELETE FROM {schema}.journal WHERE sequence <= %s"), (base.sequence,))
            return True

    def read(self) -> EngineCopy:
        with self._operation("read") as connection, connection.transaction():
            connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
            head = self._head(connection)
            bases, damaged = self._bases(connection)
            rows: dict[int, Row] = {}
            last = -1
            while page := self._page(connection, last):
                last, found, fault = page
                rows |= {row.sequence: row for row in found}
                damaged = damaged or fault
        newest = 0 if head is None else head.sequence
        return EngineCopy(bases=bases, rows=rows, newest=newest, head=head, damaged=damaged)

    def renew(self, head: EngineHead, lease_s: float) -> bool:
        return self._changed(_RENEW, {"term": head.term, "owner": head.owner, "lease_s": lease_s})

    def release(self, head: EngineHead) -> None:
        self._changed(_RENEW, {"term": head.term, "owner": head.owner, "lease_s": -1.0})

    def close(self) -> None:
        self._drop()

    def _check_durable(self, connection: _TimedConnection) -> None:
        """Raise `StorageError` for a server that acknowledges what is not on a disk or that takes no writes."""
        found = connection.execute(
            "SELECT current_setting('fsync'), current_setting('synchronous_commit'), pg_is_in_recovery()"
        ).fetchone()
        if found is None:
            raise StorageError(f"{self._shown} has no settings.")
        fsync, commit, follows = found
        if follows:
            raise EngineUnreachable(
                f"{self._shown} is a standby server, which takes no writes.",
                hint="Name all servers in the URL; the one that takes writes is found.",
            )
        if fsync == "off":
            raise StorageError(
                f"{self._shown} runs with fsync = off: it would lose what it has acknowledged in a loss of power.",
                hint="Turn fsync on.",
            )
        if commit in ("off", "local"):
            connection.execute("SET synchronous_commit = on")

    def _head(self, connection: _TimedConnection) -> EngineHead | None:
        query = f"SELECT {_COLUMNS} FROM {{schema}}.head WHERE octet_length(pool) + octet_length(owner) <= %s"
        query += " AND octet_length(chain) + octet_length(authority) <= %s"
        found = connection.execute(self._sql(query), (_MAX_NAME_BYTES, _MAX_NAME_BYTES)).fetchone()
        head = None if found is None else _typed(found, EngineHead)
        if head is None and connection.execute(self._sql("SELECT one FROM {schema}.head")).fetchone() is not None:
            raise StorageError(f"{self._shown} is damaged: its head is not as it was written.", hint=self.restoring)
        return head

    def _bases(self, connection: _TimedConnection) -> tuple[tuple[Base, ...], str]:
        size = connection.execute(self._sql("SELECT max(octet_length(state)) FROM {schema}.base")).fetchone()
        if size is not None and size[0] is not None and size[0] > MAX_STATE_BYTES:
            return (), f"its base has {size[0]} bytes, at most {MAX_STATE_BYTES} are expected"
        found = connection.execute(self._sql("SELECT sequence, chain, state, seal FROM {schema}.base")).fetchall()
        return tuple(base for row in found if (base := _typed(row, Base)) is not None), ""

    def _page(self, connection: _TimedConnection, after: int) -> tuple[int, list[Row], str] | None:
        """Return the last number, the rows, and the damage of the next page; None at the end. Sizes are read first."""
        sizes = connection.execute(
            self._sql(
                "SELECT sequence, octet_length(fact) + octet_length(chain) FROM {schema}.journal WHERE sequence > %s "
                "ORDER BY sequence LIMIT %s"
            ),
            (after, _PAGE_ROWS),
        ).fetchall()
        if not sizes:
            return None
        last, total, fault = after, 0, ""
        for sequence, size in sizes:
            if size > MAX_FACT_BYTES + 64:
                fault = f"row {sequence} has {size} bytes, at most {MAX_FACT_BYTES} are expected"
                size = 0
            if total and total + size > _PAGE_BYTES:
                break
            last, total = sequence, total + size
        found = connection.execute(
            self._sql(
                "SELECT sequence, term, fact, chain FROM {schema}.journal WHERE sequence > %s AND sequence <= %s "
                "AND octet_length(fact) + octet_length(chain) <= %s"
            ),
            (after, last, MAX_FACT_BYTES + 64),
        ).fetchall()
        return last, [row for one in found if (row := _typed(one, Row)) is not None], fault

    def _changed(self, statement: str, values: dict[str, Any]) -> bool:
        """Run one statement as a transaction of its own. Returns whether it changed a row."""
        with self._operation("written") as connection:
            try:
                return connection.execute(self._sql(statement), values).rowcount > 0
            except psycopg.Error as error:
                if error.sqlstate in _CONFLICT:
                    return False
                raise

    @contextmanager
    def _operation(self, doing: str) -> Generator[_TimedConnection]:
        """Yield the connection, and turn errors into what they say about the operation."""
        connection = self._connection
        if connection is None:
            raise EngineUnreachable(f"{self._shown}: there is no connection.")
        try:
            yield connection
        except psycopg.Error as error:
            state = error.sqlstate or ""
            if connection.closed or connection.broken or not state or state.startswith(_UNKNOWN):
                self._drop()
                raise AnswerLost(f"{self._shown} gave no answer ({_said(error)}).") from error
            if state == "25006":
                self._drop()
                raise EngineUnreachable(f"{self._shown} takes no writes any more: it has become a standby.") from error
            if state in _FULL:
                raise StorageError(
                    f"{self._shown} is full ({_said(error)}); what was asked has not been done.",
                    hint="Free some space there and ask again.",
                ) from error
            raise StorageError(f"{self._shown} can't be {doing}: {_said(error)}.") from error

    def _not_connected(self, error: psycopg.Error) -> UsageError | StorageError:
        said = _said(error)
        wrong = (error.sqlstate or "").startswith(_OF_THE_USER) or "authentication failed" in str(error)
        if wrong or "certificate" in said or "SSL" in said or isinstance(error, psycopg.ProgrammingError):
            return UsageError(f"{self._shown} can't be used: {said}.", hint="Check --journal.")
        return EngineUnreachable(f"{self._shown} can't be reached: {said}.", hint="Is PostgreSQL running there?")

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _sql(self, statement: str) -> sql.Composed:
        return sql.SQL(statement).format(schema=self._schema)  # pyright: ignore[reportArgumentType]


def is_valid(url: str) -> bool:
    """Return whether libpq can read the URL."""
    try:
        conninfo.conninfo_to_dict(url)
    except psycopg.ProgrammingError:
        return False
    return True


def _named(head: EngineHead) -> dict[str, Any]:
    return {"term": head.term, "sequence": head.sequence, "chain": head.chain, "owner": head.owner}


def _typed(row: object, kind: type[_Kind]) -> _Kind | None:
    try:
        return msgspec.convert(row, kind)
    except msgspec.ValidationError:
        return None


def _said(error: psycopg.Error) -> str:
    """Return the error's first line, without its final period."""
    lines = str(error.diag.message_primary or error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__).removesuffix(".")
