"""What a confined process can no longer do: each attempt runs in a process that has confined itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fusionai.backends.worker.client import READING_CACHES
from fusionai.backends.worker.confinement import OF_CARDS, card_files, measures
from fusionai.primitives.environment import card_kernels_directory, for_workers

pytestmark = pytest.mark.skipif(
    any(measures().values()), reason=f"this machine lacks {[name for name, why in measures().items() if why]}"
)

ATTEMPTS = """
import ctypes, json, os, socket, subprocess, sys, threading
from pathlib import Path
from fusionai.backends.worker.confinement import Confinement, confine
own, secret, port, daemon = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
held = confine(Confinement(Path(own)))
libc = ctypes.CDLL(None, use_errno=True)

def syscall(call):
    ctypes.set_errno(0)
    if call() != -1:
        return "done"
    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

def connect():
    with socket.socket() as link:
        link.connect(("127.0.0.1", port))

def thread():
    ran = []
    one = threading.Thread(target=lambda: ran.append(1)); one.start(); one.join()
    assert ran

word = ctypes.c_long()
attempts = {
    "read a key": lambda: Path(secret).read_text(),
    "list a home": lambda: os.listdir(Path(secret).parent),
    "read /etc/passwd": lambda: Path("/etc/passwd").read_text(),
    "read the daemon's memory": lambda: Path(f"/proc/{daemon}/mem").open("rb"),
    "read the daemon's environment": lambda: Path(f"/proc/{daemon}/environ").read_bytes(),
    "write beside": lambda: Path(secret).with_name("planted").write_text("x"),
    "write beside the source": lambda: Path(own, "..", "planted").write_text("x"),
    "link a key": lambda: os.link(secret, Path(own) / "linked"),
    "connect": connect,
    "listen": lambda: socket.create_server(("127.0.0.1", 0)),
    "pair": socket.socketpair,
    "run a program": lambda: subprocess.run(["/bin/true"], check=True),
    "replace itself": lambda: os.execv("/bin/true", ["true"]),
    "fork": os.fork,
    "end the daemon": lambda: os.kill(daemon, 9),
    "trace the daemon": lambda: syscall(lambda: libc.ptrace(16, daemon, 0, 0)),
    "limit the daemon": lambda: __import__("resource").prlimit(daemon, 7, (3, 3)),
    "make shared memory": lambda: os.memfd_create("x"),
    "new namespaces": lambda: syscall(lambda: libc.unshare(0x10000000)),
    "write its own directory": lambda: Path(own, "kept").write_text("x"),
    "read Python": lambda: __import__("colorsys"),
    "start a thread": thread,
}
results = {}
for name, attempt in attempts.items():
    try:
        attempt()
        results[name] = "done"
    except (OSError, subprocess.SubprocessError) as error:
        results[name] = type(error).__name__
print(json.dumps({"held": held, "results": results}))
"""
ALLOWED = {"write its own directory", "read Python", "start a thread"}


@pytest.fixture(scope="module")
def confined(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    import socket

    home, own = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("own")
    (home / "key.pem").write_text("secret")
    # A process that is neither parent nor child, as a daemon whose worker was started again.
    with socket.create_server(("127.0.0.1", 0)) as listener, subprocess.Popen(["/bin/sleep", "600"]) as daemon:
        try:
            arguments = [str(own), str(home / "key.pem"), str(listener.getsockname()[1]), str(daemon.pid)]
            ended = subprocess.run(
                [sys.executable, "-c", ATTEMPTS, *arguments], env=for_workers(), capture_output=True, check=False
            )
            assert ended.returncode == 0, ended.stderr.decode()
            assert daemon.poll() is None
        finally:
            daemon.kill()
    assert sorted(path.name for path in home.iterdir()) == ["key.pem"]
    return json.loads(ended.stdout)


def test_every_measure_holds(confined: dict[str, Any]) -> None:
    assert set(confined["held"]) == {"dump", "files", "system calls"}


def test_a_worker_reaches_nothing_but_its_own_directory(confined: dict[str, Any]) -> None:
    done = {name for name, outcome in confined["results"].items() if outcome == "done"}
    assert done == ALLOWED


def test_the_environment_of_a_worker_holds_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("FUSION_HOME", str(Path("/home")))
    assert not {"HF_TOKEN", "FUSION_HOME"} & for_workers().keys()


KERNELS = """
import sys
from pathlib import Path
from fusionai.backends.worker.confinement import Confinement, confine
assert "files" in confine(Confinement(Path(sys.argv[1])))
from fusionai.backends.torch.blocked_linear import kernels
print(kernels() is not None)
"""


@pytest.mark.slow
def test_a_confined_worker_has_the_compiled_kernels(tmp_path: Path) -> None:
    """Those of the cache or, without writing there, its own."""
    pytest.importorskip("numba")
    ended = subprocess.run(
        [sys.executable, "-c", KERNELS, str(tmp_path)],
        env={**for_workers(), **READING_CACHES},
        capture_output=True,
        check=False,
    )
    assert ended.stdout.decode().strip() == "True", ended.stderr.decode()


CARD_KERNELS = """
import sys
from pathlib import Path
from fusionai.backends.worker.confinement import Confinement, confine
if len(sys.argv) > 1:
    assert {"files", "system calls"} <= set(confine(Confinement(Path(sys.argv[1]))))
import triton
from triton.backends.compiler import GPUTarget

class Card:
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))

triton.runtime.driver.set_active(Card())
from fusionai.backends.torch import card_launch, card_variants
forms = [one for one in card_variants.variants("tf32x3") if one.name.startswith(("combine 64", "single INT4_32 32 F"))]
assert len(forms) == 2
card_variants.variants = lambda precision: iter(forms)
card_variants.compile_all()
print(card_launch._FAILED.reason)
"""


@pytest.mark.slow
def test_a_confined_worker_finds_the_kernels_for_cards_that_a_measuring_one_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a card the forms are those of a named one, and are not launched."""
    pytest.importorskip("triton", reason="Triton is for Linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "own").mkdir()
    card_kernels_directory().mkdir(parents=True)

    def said(environment: dict[str, str], *arguments: str) -> str:
        command = [sys.executable, "-c", CARD_KERNELS, *arguments]
        ended = subprocess.run(command, env=environment, capture_output=True, check=False)
        assert ended.returncode == 0, ended.stderr.decode()
        return ended.stdout.decode().strip()

    confined = {**for_workers(), **READING_CACHES}
    assert "PermissionError" in said(confined, str(tmp_path / "own"))
    assert said(for_workers()) == "None"
    assert said(confined, str(tmp_path / "own")) == "None"


def test_a_worker_knows_where_kernels_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """It can't look its home up in the list of users, and without one there were no compiled kernels."""
    monkeypatch.setenv("HOME", "/somewhere")
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert (for_workers()["HOME"], for_workers()["XDG_CACHE_HOME"]) == ("/somewhere", "/elsewhere")


def test_drivers_of_cards_read_the_cards_own_files_and_no_other_devices(tmp_path: Path) -> None:
    card, network = tmp_path / "devices/pci0/card", tmp_path / "devices/pci0/net"
    drm = tmp_path / "class/drm"
    for place in (card, network, drm / "card0"):
        place.mkdir(parents=True)
    (drm / "card0/device").symlink_to(card)
    found = set(card_files(drm))
    assert str(card.resolve()) in found
    assert found <= {str(card.resolve()), *OF_CARDS}
