"""Speaks to an etcd cluster over its JSON gateway (HTTP), as much of it as a journal needs.

Keys and values travel as base64. Every call goes to the member that answered first at `connect`; answers are read up to
a limit and for a limited time. Errors say whether the request may have been done: `EngineUnreachable`,
`AnswerLost`, `StorageError`. `etcd` keeps the journal with it.
"""

from __future__ import annotations

import base64
import ssl
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

import httpx
import msgspec

from fusionai.broker.engines.interface import CONNECT_S, OPERATION_S, AnswerLost, EngineUnreachable
from fusionai.primitives.errors import StorageError, UsageError

_Answer = TypeVar("_Answer")
MAX_ANSWER_BYTES: Final = 24 * 2**20
_UNAUTHENTICATED: Final = 16
_FULL: Final = 8
_TOO_LARGE: Final = 3
_NOT_DONE: Final = frozenset({_TOO_LARGE, 5, 6, 7, 9, 11, 12, _UNAUTHENTICATED})
"""Codes of gRPC with which etcd refuses a request before it is proposed. After others it may have been done."""
_OF_THE_USER: Final = (
    "authentication failed",
    "user name is empty",
    "permission denied",
    "authentication is not enabled",
)


class EtcdFull(StorageError):
    """etcd has no space. The request that meets the quota first may have been done all the same, but none is done
    after this answer."""


class AnswerTooLarge(StorageError):
    """The answer has more than `MAX_ANSWER_BYTES`; fewer keys must be asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdAddress:
    """Members of a cluster, and how they are spoken to. Without `tls` the traffic is plain."""

    members: tuple[str, ...]
    """HOST:PORT of each."""
    tls: bool = False
    ca: Path | None = None
    """Certificates of the authority that the members' certificates are of; None: the system's."""
    cert: Path | None = None
    key: Path | None = None
    user: str = ""
    password: str = field(default="", repr=False)


class KeyValue(msgspec.Struct, frozen=True):
    """etcd's JSON has bytes as base64 and 64-bit integers as text, and leaves out zeros."""

    key: bytes = b""
    value: bytes = b""
    lease: int = 0


class _RangeAnswer(msgspec.Struct, frozen=True):
    kvs: tuple[KeyValue, ...] = ()
    more: bool = False


class _TransactionAnswer(msgspec.Struct, frozen=True):
    succeeded: bool = False


class _LeaseAnswer(msgspec.Struct, frozen=True):
    lease: int = msgspec.field(name="ID", default=0)
    ttl_s: int = msgspec.field(name="TTL", default=0)


class _KeptAlive(msgspec.Struct, frozen=True):
    result: _LeaseAnswer = _LeaseAnswer()


class _TokenAnswer(msgspec.Struct, frozen=True):
    token: str = ""


class _ErrorAnswer(msgspec.Struct, frozen=True):
    code: int = 2
    message: str = ""
    error: Any = ""


class EtcdClient:
    """Calls to one cluster."""

    def __init__(self, address: EtcdAddress, shown: str) -> None:
        self._address = address
        self._shown = shown
        self._http: httpx.Client | None = None
        self._base = ""
        self._headers: dict[str, str] = {}

    def connect(self, probe: bytes) -> None:
        """Find a member that answers a read of the key `probe`. Raises `EngineUnreachable`, `UsageError`."""
        self.close()
        self._http = httpx.Client(
            verify=_tls(self._address) if self._address.tls else False,
            timeout=httpx.Timeout(OPERATION_S, connect=CONNECT_S),
            headers={"Accept-Encoding": "identity"},
            trust_env=False,
        )
        scheme, said = "https" if self._address.tls else "http", ""
        for member in self._address.members:
            self._base, self._headers = f"{scheme}://{member}/v3", {}
            try:
                if self._address.user:
                    login = {"name": self._address.user, "password": self._address.password}
                    found = self._ask("/auth/authenticate", login, _TokenAnswer)
                    self._headers = {"Authorization": found.token}
                # Read as others are written, so that a member without a quorum is passed over.
                self.range(probe)
                return
            except (AnswerLost, StorageError) as error:
                said = error.message
        self.close()
        if any(text in said for text in _OF_THE_USER) or "CERTIFICATE" in said or "certificate" in said:
            raise UsageError(f"{self._shown} can't be used: {said}", hint="Check --journal.")
        raise EngineUnreachable(f"{self._shown} can't be reached: {said}", hint="Is etcd running there?")

    def range(
        self, first: bytes, end: bytes = b"", *, limit: int = 0, keys_only: bool = False
    ) -> tuple[tuple[KeyValue, ...], bool]:
        """Return the keys from `first` to before `end` in order, and whether there are more than `limit`. Without
        `end`: the key `first`. Raises `AnswerTooLarge`."""
        asked: dict[str, object] = {"key": text(first), "keys_only": keys_only}
        if end:
            asked |= {"range_end": text(end), "limit": str(limit)}
        found = self._ask("/kv/range", asked, _RangeAnswer)
        return found.kvs, found.more

    def put(self, key: bytes, value: bytes) -> None:
        self._ask("/kv/put", {"key": text(key), "value": text(value)}, _TransactionAnswer)

    def transact(self, compare: Sequence[Mapping[str, object]], done: Sequence[Mapping[str, object]]) -> bool:
        """Do all of `done` if all of `compare` holds, and return whether it does."""
        return self._ask("/kv/txn", {"compare": compare, "success": done}, _TransactionAnswer).succeeded

    def grant(self, ttl_s: float) -> int:
        """Return a new lease."""
        return self._ask("/lease/grant", {"TTL": str(max(1, round(ttl_s)))}, _LeaseAnswer).lease

    def keep_alive(self, lease: int) -> bool:
        """Renew a lease. Returns False if it has ended."""
        return self._ask("/lease/keepalive", {"ID": str(lease)}, _KeptAlive).result.ttl_s > 0

    def lasts_s(self, lease: int) -> float:
        """Return how long a lease lasts; zero or less if it has ended."""
        return self._ask("/lease/timetolive", {"ID": str(lease)}, _LeaseAnswer).ttl_s

    def revoke(self, lease: int) -> None:
        self._ask("/lease/revoke", {"ID": str(lease)}, _TransactionAnswer)

    def close(self) -> None:
        if self._http is not None:
            self._http.close()
            self._http = None

    def _ask(self, path: str, content: object, kind: type[_Answer]) -> _Answer:
        if self._http is None:
            raise EngineUnreachable(f"{self._shown}: there is no connection.")
        try:
            status, answer = self._post(self._http, path, msgspec.json.encode(content))
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise EngineUnreachable(f"{self._base.removesuffix('/v3')} can't be reached ({error}).") from error
        except (httpx.HTTPError, httpx.StreamError, ssl.SSLError) as error:
            raise AnswerLost(f"{self._shown} gave no answer ({error or type(error).__name__}).") from error
        try:
            if status != httpx.codes.OK:
                raise self._refused(msgspec.json.decode(answer, type=_ErrorAnswer))
            return msgspec.json.decode(answer, type=kind, strict=False)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise AnswerLost(
                f"expected an answer of etcd from {self._shown}, got status {status} ({error})."
            ) from error

    def _post(self, http: httpx.Client, path: str, content: bytes) -> tuple[int, bytes]:
        ends_s = time.monotonic() + OPERATION_S
        answer = bytearray()
        with http.stream("POST", self._base + path, content=content, headers=self._headers) as response:
            for part in response.iter_raw(65_536):
                answer += part
                if len(answer) > MAX_ANSWER_BYTES:
                    raise AnswerTooLarge(f"{self._shown} answers with more than {MAX_ANSWER_BYTES} bytes.")
                if time.monotonic() > ends_s:
                    raise AnswerLost(f"{self._shown} gave no whole answer within {OPERATION_S:g} s.")
            return response.status_code, bytes(answer)

    def _refused(self, answer: _ErrorAnswer) -> AnswerLost | StorageError:
        said = (answer.message or str(answer.error)).removeprefix("etcdserver: ")
        if answer.code == _UNAUTHENTICATED and self._headers:
            # The token has ended. It was not done, and a new connection gets a new token.
            return EngineUnreachable(f"{self._shown} wants this broker to sign in again ({said}).")
        if answer.code == _FULL:
            return EtcdFull(
                f"{self._shown} is full ({said}); what was asked has not been done.",
                hint="Free some space there (`etcdctl compact`, `defrag`, `alarm disarm`) and ask again.",
            )
        if answer.code in _NOT_DONE:
            return StorageError(f"{self._shown} refused: {said}.")
        return AnswerLost(f"{self._shown} gave no answer ({said}).")


def text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def prefix_end(prefix: bytes) -> bytes:
    """Return the first key after all keys that begin with `prefix`."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


def _tls(address: EtcdAddress) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=None if address.ca is None else str(address.ca))
        if address.cert is not None:
            context.load_cert_chain(address.cert, address.key)
    except (OSError, ssl.SSLError) as error:
        raise UsageError(f"the certificates for etcd can't be used: {error}.", hint="Check --journal.") from error
    return context
