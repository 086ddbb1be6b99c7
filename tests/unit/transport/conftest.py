"""A pool of machines for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from harness.credentials import CertifiedPool


@pytest.fixture
def make_pool(tmp_path: Path) -> Callable[[str], CertifiedPool]:
    return lambda name: CertifiedPool(tmp_path / name, name)


@pytest.fixture
def pool(make_pool: Callable[[str], CertifiedPool]) -> CertifiedPool:
    return make_pool("friends")
