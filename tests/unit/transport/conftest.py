"""A pool of machines for the tests of this folder: an authority, and certified keys in directories of their own."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fusionai.transport.security.authority import Authority, CertifiedRole, load_authority
from fusionai.transport.security.credentials import MemberCredentials
from fusionai.transport.security.identity import load_identity


class Pool:
    def __init__(self, home: Path, name: str) -> None:
        self.home = home
        self.authority: Authority = load_authority(home / "authority", name, now_wall_s=time.time())

    def credentials(
        self, name: str, role: CertifiedRole = "member", *, issued_at_s: float | None = None
    ) -> MemberCredentials:
        identity = load_identity(self.home / name)
        now_s = time.time() if issued_at_s is None else issued_at_s
        certificate = self.authority.issue(identity.public_key, role, now_wall_s=now_s)
        return MemberCredentials(identity, certificate, self.authority.certificate)

    def issue(self, public_key: bytes) -> bytes:
        return self.authority.issue(public_key, "member", now_wall_s=time.time())


@pytest.fixture
def make_pool(tmp_path: Path) -> Callable[[str], Pool]:
    return lambda name: Pool(tmp_path / name, name)


@pytest.fixture
def pool(make_pool: Callable[[str], Pool]) -> Pool:
    return make_pool("friends")
