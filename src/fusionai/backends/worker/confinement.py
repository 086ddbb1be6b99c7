"""Takes from a worker what computing never needs: foreign files, connections, other programs.

`confine` is called once, in the worker, before it loads a framework, and before a second thread exists. On Linux it
uses Landlock (files), seccomp (system calls) and resource limits; what the kernel lacks is left out and reported.
`measures` says which of them hold on this machine, for `fusion doctor` and the pool. Libraries: `landlock` and
`pyseccomp`, which needs the system's libseccomp.
"""

from __future__ import annotations

import errno
import os
import sys
import sysconfig
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal, TextIO

from fusionai.primitives.environment import card_kernels_directory

Measure = Literal["files", "system calls", "memory", "dump"]
READABLE: Final = (
    "/usr",
    "/lib",
    "/lib64",
    "/bin",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/proc/cpuinfo",
    "/proc/meminfo",
)
"""Files of the system that frameworks read: libraries, their loader's index, what the processor can do."""
OF_SYSTEM: Final = ("/proc/self", "/sys/devices/system", "/sys/fs/cgroup", "/opt")
DEVICES: Final = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
CARDS: Final = ("nvidia*", "kfd", "dri/*", "nvidia-caps/*")
"""Below /dev: graphics cards. Their drivers decide what a program may do with a card."""
OF_CARDS: Final = (
    *("/proc/driver/nvidia", "/proc/devices", "/proc/modules", "/sys/module/nvidia", "/sys/module/nvidia_uvm"),
    *("/sys/module/amdgpu", "/sys/class/kfd", "/sys/devices/virtual/kfd", "/sys/class/drm", "/sys/dev/char"),
)
"""What drivers of graphics cards read to find the cards and their versions, where there are cards."""
DRM: Final = Path("/sys/class/drm")
FORBIDDEN: Final = (
    *("socket", "socketpair", "connect", "bind", "listen", "accept", "accept4", "sendto", "sendmsg", "sendmmsg"),
    *("execve", "execveat", "fork", "vfork", "ptrace", "process_vm_readv", "process_vm_writev", "kill", "tkill"),
    *("pidfd_open", "pidfd_getfd", "pidfd_send_signal", "mount", "umount2", "pivot_root", "chroot", "unshare", "setns"),
    *("bpf", "perf_event_open", "io_uring_setup", "io_uring_enter", "io_uring_register", "userfaultfd", "keyctl"),
    *("add_key", "request_key", "init_module", "finit_module", "kexec_load", "memfd_create", "shmget", "shmat"),
    *("msgget", "semget", "mq_open", "fanotify_init", "inotify_init1", "open_by_handle_at", "syslog", "swapon"),
)
"""System calls that computing never needs. Each fails with EPERM."""
CLONE_THREAD: Final = 0x10000


@dataclass(frozen=True, slots=True)
class Confinement:
    """Limits of a worker. `memory_bytes`: private memory beyond what is used when confined; None: no limit.
    `directory`: the only place where it may write, at most `directory_bytes` a file."""

    directory: Path
    memory_bytes: int | None = None
    directory_bytes: int = 1 << 34


def confine(limits: Confinement) -> tuple[Measure, ...]:
    """Confine this process for good. Return the measures that hold from now on."""
    held: list[Measure] = []
    if sys.platform != "linux":
        return ()
    _own_status()
    only_computing = _system_calls()  # finding the library starts programs and reads files
    if _without_dumps(limits):
        held.append("dump")
    if _only_files(_readable(), limits.directory):
        held.append("files")
    if only_computing is not None:
        only_computing.load()
        held.append("system calls")
    return tuple(held)


def limit_memory(memory_bytes: int) -> bool:
    """Limit this process's private memory to what it has now and `memory_bytes`. An allocation beyond fails, so that a
    backend raises an error that names it."""
    if sys.platform != "linux":
        return False
    import resource

    used_bytes = _private_bytes()
    limit_bytes = used_bytes + memory_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))
    return True


def measures() -> dict[Measure, str]:
    """Return, for each measure, an empty string if it can be taken here, else why not."""
    if sys.platform != "linux":
        missing = f"not available on {sys.platform}"
        return {"files": missing, "system calls": missing, "memory": missing, "dump": missing}
    found: dict[Measure, str] = {"files": "", "system calls": "", "memory": "", "dump": ""}
    try:
        from landlock import LandlockError, landlock_abi_version

        try:
            landlock_abi_version()
        except (LandlockError, OSError):
            found["files"] = "the kernel has no Landlock, or it is switched off (Linux 5.13 and newer have it)"
    except ImportError:
        found["files"] = "the package landlock is not installed"
    try:
        import pyseccomp as _  # noqa: F401 - loading it loads the system's library
    except (ImportError, OSError, RuntimeError):
        found["system calls"] = "libseccomp is not installed"
    return found


def _without_dumps(limits: Confinement) -> bool:
    """No core files, no tracing by other processes of this user, no new privileges, files of limited size."""
    if sys.platform != "linux":
        return False
    import ctypes
    import resource

    pr_set_dumpable, pr_set_no_new_privs = 4, 38
    libc = ctypes.CDLL(None, use_errno=True)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (limits.directory_bytes, limits.directory_bytes))
    return libc.prctl(pr_set_dumpable, 0, 0, 0, 0) == 0 and libc.prctl(pr_set_no_new_privs, 1, 0, 0, 0) == 0


def _readable() -> list[str]:
    """Return what a framework must read: Python, its packages, this package, the system's libraries."""
    paths = {*READABLE, *OF_SYSTEM, sys.prefix, sys.base_prefix, sys.exec_prefix, *sysconfig.get_paths().values()}
    paths |= {entry for entry in sys.path if entry}
    paths.add(str(Path(__file__).parents[2]))
    paths.add(str(card_kernels_directory()))
    return sorted(path for path in paths if Path(path).exists())


def _cards(devices: Path) -> list[str]:
    return [str(card) for pattern in CARDS for card in devices.glob(pattern) if not card.is_dir()]


def card_files(drm: Path) -> list[str]:
    """Return what drivers of cards must read: their own files, and the directories of the cards themselves, but not
    those of other devices, which hold addresses and serial numbers."""
    devices = {str(card.resolve()) for card in drm.glob("*/device")}
    return sorted(path for path in {*OF_CARDS, *devices} if Path(path).exists())


def _only_files(readable: Sequence[str], directory: Path) -> bool:
    """Allow reading `readable` and devices, and writing in `directory` alone."""
    try:
        from landlock import FSAccess, LandlockError, Ruleset

        rules = Ruleset()
    except (ImportError, OSError):
        return False
    read = FSAccess.READ_FILE | FSAccess.READ_DIR
    for path in readable:
        rules.allow(path, rules=read if Path(path).is_dir() else FSAccess.READ_FILE)
    cards = _cards(Path("/dev"))
    for path in card_files(DRM) if cards else ():
        rules.allow(path, rules=read if Path(path).is_dir() else FSAccess.READ_FILE)
    for path in (*DEVICES, *cards):
        with suppress(FileNotFoundError):
            rules.allow(path, rules=FSAccess.all_file() & ~FSAccess.EXECUTE & ~FSAccess.TRUNCATE)
    rules.allow(str(directory), rules=FSAccess.all() & ~FSAccess.EXECUTE)
    try:
        rules.apply()
    except (LandlockError, OSError):
        return False
    return True


def _system_calls() -> Any:
    """Return a filter that forbids `FORBIDDEN`, new processes, and limits of other processes; None without the
    library."""
    try:
        import pyseccomp as seccomp
    except (ImportError, OSError, RuntimeError):
        return None
    refuse = seccomp.ERRNO(errno.EPERM)
    rules = seccomp.SyscallFilter(defaction=seccomp.ALLOW)
    for name in FORBIDDEN:
        with suppress(ValueError):  # an architecture may lack it
            rules.add_rule(refuse, name)
    # A thread is made by `clone` with this flag; the C library falls back to `clone` where `clone3` does not exist.
    rules.add_rule(refuse, "clone", seccomp.Arg(0, seccomp.MASKED_EQ, CLONE_THREAD, 0))
    rules.add_rule(seccomp.ERRNO(errno.ENOSYS), "clone3")
    rules.add_rule(refuse, "prlimit64", seccomp.Arg(0, seccomp.NE, 0))
    return rules


@cache
def _own_status() -> TextIO:
    """Return this process's open status file. It is opened before the confinement: the kernel may forget the directory
    of a process and make it anew, and then rules about files do not cover it any more."""
    return open("/proc/self/status", encoding="utf-8")


def _private_bytes() -> int:
    """Return the private memory that RLIMIT_DATA counts now."""
    file = _own_status()
    file.seek(0)
    for line in file:
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    return 0


def own_directory(parent: Path) -> Path:
    """Make a directory for one worker, readable by its user only."""
    import tempfile

    path = Path(tempfile.mkdtemp(prefix="worker-", dir=parent))
    os.chmod(path, 0o700)
    return path
