"""Lets a confined worker read compiled kernels from numba's cache on disk, and keeps it from writing any.

A later process executes what lies in that cache, so a worker that ran a stranger's graph must not change it. Numba
loads this module by the variable NUMBA_CACHE_LOCATOR_CLASSES, which `client` sets for confined workers. A kernel that
is missing in the cache is compiled for this process alone.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

from numba.core import caching


class ReadOnlyLocator(caching.InTreeCacheLocator):
    """The place beside the source where numba keeps kernels, or the user's own if there are none."""

    def __init__(self, py_func: Any, py_file: Any) -> None:
        super().__init__(py_func, py_file)
        if not _has_kernels(self.get_cache_path()):
            users = caching.UserWideCacheLocator(py_func, py_file).get_cache_path()
            if _has_kernels(users):
                self._cache_path = users

    def ensure_cache_path(self) -> None:
        """Accept the place although nothing can be written there."""


def _has_kernels(path: str) -> bool:
    with suppress(OSError):
        return any(name.endswith(".nbi") for name in os.listdir(path))
    return False


_save = caching.IndexDataCacheFile.save


def _without_errors(self: Any, key: Any, data: Any) -> None:
    with suppress(OSError):
        _save(self, key, data)


caching.IndexDataCacheFile.save = _without_errors
