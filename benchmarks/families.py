"""Which causal families of transformers are served, and how: every name of its table of causal language models.

    python benchmarks/families.py [--only NAME[,NAME]] [--again] [--json FILE] [--limit-s S] [--limit-gb GB]

Each family in a process of its own with limits of time and memory (tests/harness/served_families.py). FILE is
docs/families.json unless said otherwise; families that it has of the same version of transformers are kept, so that a
stopped run continues. Afterwards `make docs` writes docs/models.md from it. Exit code 1 if more than a twentieth is
refused, or any family is served with other logits.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import resource
import sys
import time
from collections import Counter
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from fusionai.storage.atomic import write_atomic
from harness.families import family_names
from harness.served_families import Family, examine_family

FILE = Path(__file__).parents[1] / "docs" / "families.json"


def main() -> int:
    arguments = _arguments()
    number = version("transformers")
    known = _known(arguments.json, number)
    names = family_names()
    _quiet()
    for name in arguments.only or names:
        if name in known and not arguments.again:
            continue
        began_s = time.perf_counter()
        known[name] = found = _guarded(name, arguments.limit_s, arguments.limit_gb)
        took_s = time.perf_counter() - began_s
        print(f"{name}: {found.how} {found.reason} {found.ready_s:.1f} s to be ready  [{took_s:.0f} s]", flush=True)
        rows = [msgspec.to_builtins(known[name]) for name in names if name in known]
        untried = [name for name in names if name not in known]
        document = {"schema": "fusionai.families/1", "transformers": number, "untried": untried, "rows": rows}
        write_atomic(arguments.json, json.dumps(document, indent=1).encode() + b"\n")
    counts = Counter(family.how for family in known.values())
    print(", ".join(f"{count} {how}" for how, count in counts.most_common()))
    return int(counts["missed"] + counts["unready"] > 0 or counts["refused"] * 20 > len(known))


def _quiet() -> None:
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def _guarded(name: str, limit_s: float, limit_gb: float) -> Family:
    """Examine the family in a process of its own, which begins with all modules loaded."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(name, limit_gb, sender))
    process.start()
    sender.close()
    found = None
    if receiver.poll(limit_s):
        with contextlib.suppress(EOFError):
            found = msgspec.json.decode(receiver.recv_bytes(), type=Family)
    reason = f"not ready after {limit_s:.0f} s" if process.is_alive() else "its process ended"
    process.kill()
    process.join()
    return found or Family(name=name, architecture="", how="unready", reason=reason)


def _child(name: str, limit_gb: float, sender: Connection) -> None:
    limit = int(limit_gb * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    sender.send_bytes(msgspec.json.encode(examine_family(name)))


def _known(file: Path, number: str) -> dict[str, Family]:
    if not file.exists():
        return {}
    found = json.loads(file.read_text())
    return (
        {row["name"]: msgspec.convert(row, Family) for row in found["rows"]} if found["transformers"] == number else {}
    )


def _arguments() -> argparse.Namespace:
    def names(text: str) -> tuple[str, ...]:
        return tuple(name for name in text.split(",") if name)

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", type=names, default=(), help="families, separated by commas")
    parser.add_argument("--again", action="store_true", help="try again what the file has")
    parser.add_argument("--json", type=Path, default=FILE)
    parser.add_argument("--limit-s", type=float, default=300.0, help="seconds for each family")
    parser.add_argument("--limit-gb", type=float, default=10.0, help="address space for each family")
    arguments = parser.parse_args()
    if unknown := set(arguments.only) - set(family_names()):
        parser.error(f"transformers has no causal family {min(unknown)!r}")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
