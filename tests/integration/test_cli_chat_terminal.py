"""`fusion chat` on a terminal: Ctrl-C breaks off an answer and its generation, a gateway that goes away ends no talk,
Ctrl-C at the prompt leaves.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from harness.gateway_stand import gateway_stand, until
from harness.patience import CEILING_S
from harness.scripted_engine import ScriptedEngine
from harness.tiny_text import write_tiny_text

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(sys.platform == "win32", reason="terminals of POSIX"),
]
PATIENCE_S = CEILING_S


class Terminal:
    """A command on a terminal of its own; `said` is all it wrote."""

    def __init__(self, *arguments: str) -> None:
        import fcntl
        import pty
        import termios

        def has_the_terminal() -> None:
            # Keys such as Ctrl-C reach whoever has the terminal; who runs the tests in the background ignores them.
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
            signal.signal(signal.SIGINT, signal.SIG_DFL)

        self.said = ""
        self._ours, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "fusionai", *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=has_the_terminal,
            env={**os.environ, "TERM": "dumb"},
        )
        os.close(theirs)
        asyncio.get_running_loop().add_reader(self._ours, self._read)

    def _read(self) -> None:
        try:
            fresh = os.read(self._ours, 65536)
        except OSError:  # the other side has closed it
            fresh = b""
        if not fresh:
            asyncio.get_running_loop().remove_reader(self._ours)
        self.said += fresh.decode(errors="replace")

    def types(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    async def heard(self, words: str, after: int = 0) -> None:
        """Wait for words, between which lines may end."""
        pattern = words.replace(" ", r"\s+")
        try:
            await until(lambda: re.search(pattern, self.said[after:]) is not None, limit_s=PATIENCE_S)
        except TimeoutError:
            raise AssertionError(f"{words!r} never came: {self.said}") from None

    async def breaks_off(self) -> None:
        """Ctrl-C, again after a while as anybody would: Python sees a signal that comes just before it begins to wait
        for a socket only with the next one."""
        for _ in range(10):
            self.types("\x03")
            with contextlib.suppress(TimeoutError):
                await until(lambda: "[cancelled]" in self.said, limit_s=6.0)
                return
        raise AssertionError(f"the answer was never broken off: {self.said}")

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._ours)
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


def test_keys_on_a_terminal(tmp_path: Path) -> None:
    text = write_tiny_text(tmp_path)

    async def scenario() -> None:
        engine = ScriptedEngine(text, script=lambda prompt, generation: "Together. " * 3)
        async with gateway_stand(engine) as stand:
            terminal = Terminal("chat", "--url", stand.url)
            try:
                await terminal.heard("tiny at http")
                terminal.types("How?\n")
                await terminal.heard(r"tokens in .*first token after .*tokens/s.*/peers shows the route")
                terminal.types("/peers\n")
                await terminal.heard("Route of the last answer: owner > laptop > tower > owner")
                await terminal.heard("transfer")
                # In the middle of an answer.
                engine.gate = asyncio.Event()
                terminal.types("And now?\n")
                await until(lambda: engine.live == 1, limit_s=PATIENCE_S)
                await terminal.breaks_off()
                await until(lambda: engine.live == 0, limit_s=PATIENCE_S)
                engine.gate = None
                before = len(terminal.said)
                terminal.types("Again?\n")
                await terminal.heard("first token after", before)
                assert terminal.process.poll() is None
            except BaseException:
                terminal.close()
                raise
        try:
            # The gateway is gone; the talk is not.
            before = len(terminal.said)
            terminal.types("Still there?\n")
            await terminal.heard("no gateway answers at", before)
            await terminal.heard("> $", before)
            terminal.types("\x03")
            await until(lambda: terminal.process.poll() is not None, limit_s=PATIENCE_S)
            assert terminal.process.returncode == 0, terminal.said
            assert "Traceback" not in terminal.said
        finally:
            terminal.close()

    asyncio.run(scenario())
