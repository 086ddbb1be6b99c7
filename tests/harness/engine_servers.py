"""Real servers for a pool's journal: PostgreSQL and etcd on loopback ports, in a directory of their own.

They can be killed, suspended and started again with their data. What they need must be installed (`why_not` says what
is missing). Tests name a schema or prefix each, so that one server serves a module. Neighbours: `harness.fault_proxy`
stands between a broker and its server.
"""

from __future__ import annotations

import os
import pwd
import shutil
import ssl
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Final
from urllib.parse import quote

import httpx
import psutil

from fusionai.broker.engines.locations import engine_at
from fusionai.primitives.environment import inherited
from fusionai.primitives.errors import FusionError
from harness.certificates import self_signed
from harness.fault_proxy import LOOPBACK, free_port
from harness.patience import CEILING_S

PASSWORD: Final = "p@ss/word"
_SERVER_USER: Final = "postgres"
_POLL_S: Final = 0.05
_POSTGRES_SETTINGS: Final = """
listen_addresses = '127.0.0.1'
unix_socket_directories = ''
shared_buffers = '16MB'
max_connections = 20
max_wal_size = '64MB'
autovacuum = off
"""


class EngineServer(ABC):
    """`with PostgresServer() as server:` starts it and removes all of it at the end."""

    def __init__(self) -> None:
        self.port = free_port()
        self.directory = Path(tempfile.mkdtemp(prefix="fusion-engine-"))
        self._process: subprocess.Popen[bytes] | None = None

    @abstractmethod
    def url(self, name: str, port: int | None = None) -> str:
        """URL of the journal `name`, at a proxy's port if one is given."""

    @abstractmethod
    def command(self) -> Sequence[str | Path]: ...

    def start(self) -> None:
        self.launch()
        self.wait_until_ready()

    def launch(self) -> None:
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [str(part) for part in self.command()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.directory,
                env=inherited(),
                **self.owner(),
            )

    def wait_until_ready(self) -> None:
        assert self._process is not None
        deadline_s = time.monotonic() + CEILING_S
        engine = engine_at(self.url("ready"))
        while True:
            try:
                engine.connect()
                engine.close()
                return
            except FusionError:
                if self._process.poll() is not None or time.monotonic() > deadline_s:
                    raise AssertionError((self.directory / "log").read_text(errors="replace")[-4000:]) from None
                time.sleep(_POLL_S)

    def owner(self) -> dict[str, str]:
        return {}

    def certificate(self) -> tuple[Path, Path]:
        """Files of a certificate for localhost, which is its own authority, and of its key."""
        certificate, key = self_signed(self.directory)
        key.chmod(0o600)
        return certificate, key

    def kill(self) -> None:
        """As a loss of power: every process of the server ends without a word."""
        for process in self._processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        if self._process is not None:
            self._process.wait()
            self._process = None

    def suspend(self) -> None:
        for process in self._processes():
            process.suspend()

    def resume(self) -> None:
        for process in self._processes():
            process.resume()

    def _processes(self) -> list[psutil.Process]:
        if self._process is None:
            return []
        main = psutil.Process(self._process.pid)
        return [main, *main.children(recursive=True)]

    def __enter__(self) -> EngineServer:
        try:
            self.start()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)


class PostgresServer(EngineServer):
    """`guarded`: it takes TLS and a password only. `copied_from`: it follows that running server, as a standby."""

    def __init__(self, *, guarded: bool = False, copied_from: PostgresServer | None = None) -> None:
        super().__init__()
        self._guarded = guarded
        files = self.certificate() if guarded else ()
        (self.directory / "password").write_text(PASSWORD)
        if os.geteuid() == 0:
            account = pwd.getpwnam(_SERVER_USER)
            for path in (self.directory, *files, self.directory / "password"):
                os.chown(path, account.pw_uid, account.pw_gid)
        programs = _postgres_programs()
        assert programs is not None
        self._postgres = programs / "postgres"
        self._data = self.directory / "data"
        if copied_from is None:
            making = [
                *(programs / "initdb", "-D", self._data, "-U", "broker", "-E", "UTF8", "--no-locale", "-N"),
                *("-A", "scram-sha-256" if guarded else "trust", "--pwfile", self.directory / "password"),
            ]
        else:
            making = [
                *(programs / "pg_basebackup", "--pgdata", self._data, "--write-recovery-conf", "--no-sync"),
                *("--checkpoint=fast", "--dbname", copied_from.url("any").partition("?")[0]),
            ]
        subprocess.run(making, check=True, capture_output=True, cwd=self.directory, **self.owner())
        with (self._data / "postgresql.conf").open("a") as settings:
            settings.write(f"{_POSTGRES_SETTINGS}port = {self.port}\n")
            if files:
                settings.write(f"ssl = on\nssl_cert_file = '{files[0]}'\nssl_key_file = '{files[1]}'\n")
        if guarded:
            (self._data / "pg_hba.conf").write_text("hostssl all all 127.0.0.1/32 scram-sha-256\n")

    def url(self, name: str, port: int | None = None) -> str:
        if self._guarded:
            place = f"broker:{quote(PASSWORD, safe='')}@localhost:{port or self.port}/postgres?schema={name}"
            return f"postgresql://{place}&sslmode=verify-full&sslrootcert={self.directory / 'cert.pem'}"
        return f"postgresql://broker@{LOOPBACK}:{port or self.port}/postgres?schema={name}"

    def command(self) -> Sequence[str | Path]:
        return (self._postgres, "-D", self._data)

    def execute(self, *statements: str) -> list[tuple[object, ...]]:
        """Run statements on this server. Returns the rows of the last one."""
        import psycopg

        with psycopg.connect(self.url("any").partition("?")[0], autocommit=True) as connection:
            cursor = connection.cursor()
            for statement in statements:
                cursor.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []

    def wait_until_ready(self) -> None:
        """Wait for an answer; a standby gives one that `PostgresEngine` does not take, because it takes no writes."""
        if not (self._data / "standby.signal").exists():
            super().wait_until_ready()
            return
        import psycopg

        deadline_s = time.monotonic() + CEILING_S
        while True:
            with suppress(psycopg.OperationalError):
                if self.execute("SELECT 1 FROM pg_stat_wal_receiver WHERE status = 'streaming'"):
                    return
            assert time.monotonic() < deadline_s, (self.directory / "log").read_text(errors="replace")[-4000:]
            time.sleep(_POLL_S)

    def owner(self) -> dict[str, str]:
        return {"user": _SERVER_USER, "group": _SERVER_USER} if os.geteuid() == 0 else {}


class EtcdServer(EngineServer):
    """`guarded`: it takes TLS and a password only."""

    def __init__(self, *flags: str, guarded: bool = False) -> None:
        super().__init__()
        self._guarded = guarded
        self._has_users = False
        if guarded:
            certificate, key = self.certificate()
            flags = (*flags, "--cert-file", str(certificate), "--key-file", str(key))
            (self.directory / "password").write_text(PASSWORD)
        self.peer_url = f"http://{LOOPBACK}:{free_port()}"
        self._flags = flags
        self.members: Sequence[EtcdServer] = (self,)
        """All members of its cluster."""

    def url(self, name: str, port: int | None = None) -> str:
        if not self._guarded:
            return f"etcd://{LOOPBACK}:{port or self.port}/{name}"
        login = f"&password_file={self.directory / 'password'}" if self._has_users else ""
        user = "root@" if self._has_users else ""
        return f"etcd://{user}localhost:{port or self.port}/{name}?ca={self.directory / 'cert.pem'}{login}"

    def start(self) -> None:
        super().start()
        if self._guarded and not self._has_users:
            trusted = ssl.create_default_context(cafile=str(self.directory / "cert.pem"))
            calls = (
                ("user/add", {"name": "root", "password": PASSWORD}),
                ("user/grant", {"user": "root", "role": "root"}),
                ("enable", {}),
            )
            for path, content in calls:
                url = f"https://localhost:{self.port}/v3/auth/{path}"
                httpx.post(url, json=content, verify=trusted, trust_env=False).raise_for_status()
            self._has_users = True

    def command(self) -> Sequence[str | Path]:
        scheme = "https" if self._guarded else "http"
        clients, peers = f"{scheme}://{LOOPBACK}:{self.port}", self.peer_url
        cluster = ",".join(f"m{one.port}={one.peer_url}" for one in self.members)
        return (
            *("etcd", "--name", f"m{self.port}", "--data-dir", self.directory / "data", "--log-level", "error"),
            *("--listen-client-urls", clients, "--advertise-client-urls", clients),
            *("--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers),
            *("--initial-cluster", cluster, "--heartbeat-interval", "50", "--election-timeout", "500"),
            *self._flags,
        )


@contextmanager
def etcd_cluster(count: int) -> Generator[tuple[EtcdServer, ...]]:
    """Start the members of one cluster."""
    servers = tuple(EtcdServer() for _ in range(count))
    try:
        for server in servers:
            server.members = servers
            server.launch()
        for server in servers:
            server.wait_until_ready()
        yield servers
    finally:
        for server in servers:
            server.__exit__(None, None, None)


def _postgres_programs() -> Path | None:
    """Directory of `postgres` and `initdb`: Debian does not put them on the path."""
    found = shutil.which("initdb")
    places = (
        [Path(found).resolve().parent] if found else sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    )
    return next((place for place in places if (place / "postgres").exists()), None)


def why_not(kind: type[EngineServer]) -> str:
    """Why no server of this kind can be started here; empty if one can."""
    if sys.platform == "win32":
        return "these servers are started on Unix only"
    if kind is EtcdServer:
        return "" if shutil.which("etcd") else "etcd is not installed (Debian: etcd-server)"
    if _postgres_programs() is None:
        return "PostgreSQL is not installed (Debian: postgresql)"
    if os.geteuid() == 0:
        try:
            pwd.getpwnam(_SERVER_USER)
        except KeyError:
            return f"PostgreSQL does not run as root, and there is no user {_SERVER_USER}"
    return ""
