"""Reads where a journal is: in files of the broker's home, or in an engine named by a URL.

    sqlite                                                         files in the broker's home
    postgresql://[USER[:PASSWORD]@]HOST[:PORT][,HOST...]/DATABASE  further parameters are libpq's; `schema` is ours
    etcd://[USER[:PASSWORD]@]HOST[:PORT][,HOST...][/PREFIX]        with tls, ca, cert, key, password_file

Beyond loopback connections are encrypted and the server's certificate is checked, unless the URL says otherwise.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from fusionai.broker.engines.etcd import EtcdEngine
from fusionai.broker.engines.etcd_client import EtcdAddress
from fusionai.broker.engines.interface import JournalEngine
from fusionai.primitives.errors import UsageError, nearest
from fusionai.transport.routes.addresses import is_loopback

EMBEDDED: Final = "sqlite"
ETCD_PORT: Final = 2379
DEFAULT_NAME: Final = "fusionai"
"""Schema or prefix of a journal whose URL has none."""
_ETCD_OPTIONS: Final = ("tls", "ca", "cert", "key", "password_file")
_ESCAPE: Final = "Write SCHEME://USER:PASSWORD@HOST:PORT/NAME, with special characters of user and password as %XX."
_SCHEMA: Final = re.compile(r"[a-z_][a-z0-9_]{0,62}")
_MEMBER: Final = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[^\[\]:/@\s]+)(:(?P<port>\d{1,5}))?")


def engine_at(url: str) -> JournalEngine:
    """Return the engine, not connected yet. Raises `UsageError` for a URL that can't be read and for a package that is
    not installed."""
    scheme = urlsplit(url).scheme
    if scheme == "etcd":
        return _etcd(url)
    if scheme in ("postgresql", "postgres"):
        return _postgresql(url)
    raise UsageError(
        f"expected {EMBEDDED}, postgresql://HOST/DATABASE or etcd://HOST[,HOST...], got {scheme or url!r}.",
        hint="See docs/operating.md.",
    )


def _postgresql(url: str) -> JournalEngine:
    try:
        from fusionai.broker.engines.postgresql import PostgresEngine, is_valid
    except ImportError:
        raise UsageError(
            "a journal in PostgreSQL needs the package 'psycopg', which is not installed.",
            hint="Run: pip install 'fusionai[postgresql]'",
        ) from None
    parts = urlsplit(url)
    given = _options(parts.query)
    schema = given.pop("schema", DEFAULT_NAME)
    if not _SCHEMA.fullmatch(schema):
        raise UsageError(f"expected a schema of small letters, digits and underscores in --journal, got {schema!r}.")
    hosts = parts.netloc.rpartition("@")[2]
    names = [host for one in hosts.split(",") if (host := _host(one))] + given.get("host", "").split(",")
    if not all(_is_here(name) for name in names):
        given.setdefault("sslmode", "verify-full")
    if "," in hosts:
        given.setdefault("target_session_attrs", "read-write")
    if not all(not one or one.startswith("%2F") or _host(one) for one in hosts.split(",")) or "@" in parts.path:
        raise UsageError("the hosts in the URL of PostgreSQL can't be read.", hint=_ESCAPE)
    query = urlencode(given, quote_via=quote)
    full = f"postgresql://{parts.netloc}{parts.path}{'?' if query else ''}{query}"
    if parts.fragment or not is_valid(full):
        raise UsageError(
            f"libpq can't read the URL of the journal at {hosts or 'this machine'}.",
            hint=_ESCAPE,
        )
    return PostgresEngine(full, schema, f"postgresql://{hosts}{parts.path or '/'} (schema {schema})")


def _etcd(url: str) -> JournalEngine:
    parts = urlsplit(url)
    login, _, hosts = parts.netloc.rpartition("@")
    given = _options(parts.query)
    matches = [_MEMBER.fullmatch(one) for one in hosts.split(",")]
    if not all(matches) or "@" in parts.path:
        raise UsageError("the hosts in the URL of etcd can't be read.", hint=_ESCAPE)
    members = tuple(f"{one['host']}:{one['port'] or ETCD_PORT}" for one in matches if one)
    if unknown := sorted(set(given) - set(_ETCD_OPTIONS)):
        raise UsageError(f"the URL of etcd has the unknown option {unknown[0]!r}: {nearest(unknown[0], _ETCD_OPTIONS)}")
    files: dict[str, Any] = {name: Path(given[name]) for name in ("ca", "cert", "key") if name in given}
    here = all(_is_here(_host(member)) for member in members)
    tls = given.get("tls", "off" if here and not files else "on")
    if tls not in ("on", "off") or (files and tls == "off"):
        raise UsageError(f"expected tls=on, or tls=off without certificates, in the URL of etcd, got tls={tls}.")
    user, _, password = map(unquote, login.partition(":"))
    if "password_file" in given:
        password = _first_line(Path(given["password_file"]))
    prefix = unquote(parts.path).strip("/") or DEFAULT_NAME
    address = EtcdAddress(members=members, tls=tls == "on", user=user, password=password, **files)
    return EtcdEngine(address, prefix, f"etcd://{','.join(members)}/{quote(prefix)}")


def _options(query: str) -> dict[str, str]:
    """Return the options of a URL. As in libpq, `+` is no space."""
    return dict(parse_qsl(query.replace("+", "%2B"), keep_blank_values=True))


def _host(member: str) -> str:
    match = _MEMBER.fullmatch(member)
    return "" if match is None else match["host"].strip("[]")


def _is_here(host: str) -> bool:
    """Whether a host is this machine: a Unix socket, loopback, or none."""
    return not host or host.startswith("/") or host == "localhost" or is_loopback(host)


def _first_line(file: Path) -> str:
    try:
        return (file.read_text(encoding="utf-8").splitlines() or [""])[0]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the password file {file} can't be read: {error}.") from error
