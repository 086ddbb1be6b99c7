"""Threads for the work on texts: templates, tokenizers and grammars never run on the event loop that all streams share.

Decides how many run at once and how long each may take: a client chooses the text, and a model's author the template.
`context` calls it for every request; constraints compile on a thread of their own (`serving.constraint`).
"""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

from fusionai.gateway.config import RequestLimits
from fusionai.gateway.errors import ApiError, as_api_error

P = ParamSpec("P")
Result = TypeVar("Result")


class TextThreads:
    """Runs work in threads, at most `RequestLimits.texts` at once, each for at most `text_s`.

    Each piece of work has a thread of its own, which is a daemon: work that can't be interrupted holds its place until
    it ends, but never the process."""

    def __init__(self, limits: RequestLimits) -> None:
        self._limit_s = limits.text_s
        self._places = asyncio.Semaphore(limits.texts)

    async def run(self, work: Callable[P, Result], *args: P.args, **kwargs: P.kwargs) -> Result:
        """Return the work's result. Raises `ApiError` for failures of templates and tokenizers and for work that takes
        too long: it is interrupted. With all places taken for that long, the gateway is busy."""
        try:
            async with asyncio.timeout(self._limit_s):
                await self._places.acquire()
        except TimeoutError:
            message = "All threads that read prompts are busy."
            raise ApiError(503, message, code="text_threads_busy", retry_after_s=self._limit_s) from None
        job = _Job(lambda: work(*args, **kwargs), self._places.release)
        try:
            with as_api_error():
                async with asyncio.timeout(self._limit_s):
                    return await job.result
        except TimeoutError:
            message = f"Reading this prompt took longer than {self._limit_s:g} s."
            raise ApiError(400, message, code="prompt_too_costly") from None
        finally:
            job.interrupt()


class _Interrupted(SystemExit):
    """Raised inside a thread whose work is not needed any more. A thread that ends with it prints nothing."""


class _Job:
    """One piece of work in a thread that has begun. `result`: a future on the event loop."""

    def __init__(self, work: Callable[[], Any], on_end: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self.result: asyncio.Future[Any] = self._loop.create_future()
        self._work = work
        self._on_end = on_end
        self._mutex = threading.Lock()
        self._runs = True
        self._thread = threading.Thread(target=self._run, name="gateway-text", daemon=True)
        self._thread.start()

    def interrupt(self) -> None:
        """Raise an error in the thread if it still works. It ends between two steps of Python code, so not within a
        call of a library that is not written in Python."""
        with self._mutex:
            if self._runs and self._thread.ident is not None:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(self._thread.ident), ctypes.py_object(_Interrupted)
                )

    def _run(self) -> None:
        value, error = None, None
        try:
            try:
                value = self._work()
            finally:
                with self._mutex:
                    self._runs = False
        except BaseException as problem:  # noqa: BLE001 - a thread's boundary: the caller gets every error
            error = problem
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._ended, value, error)

    def _ended(self, value: Any, error: BaseException | None) -> None:
        self._on_end()
        if self.result.done():  # the caller has gone
            return
        if error is None:
            self.result.set_result(value)
        else:
            self.result.set_exception(error)
