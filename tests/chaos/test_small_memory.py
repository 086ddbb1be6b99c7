"""A machine that may use a third of what a stage would plainly take, and is held to it from outside: it trains all the
same. Where not even that is enough, the job is refused with the missing bytes; nobody is killed.

The limit is on writable private memory (RLIMIT_DATA), set on the peer's process once it has joined: what the program
itself takes by then, what its provider lends, and a little for connections.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusionai.primitives.units import parse_bytes
from harness.live_pool import LivePool, Process, fusion, write_recipe, write_text

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(sys.platform != "linux", reason="only there a running process can be given a limit"),
]

LENT = "170MB"
LITTLE = "122MB"
TOO_LITTLE = "90MB"
LENDERS = {"roomy": LENT, "narrow": LITTLE, "cramped": TOO_LITTLE}
BESIDES_BYTES = 48 * 2**20
MODEL = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
}
_SIZE = r"(\d+(?:\.\d+)?) ?([kMG]?B)"


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LivePool]:
    directory = tmp_path_factory.mktemp("pool")
    with LivePool(directory) as opened:
        for name, lent in LENDERS.items():
            opened.members[name] = Process(
                *("join", opened.invite(), "--home", directory / name, "--host", "127.0.0.1"),
                *("--threads", "1", "--name", name, "--max-memory", lent),
            )
            opened.members[name].wait_for("In pool")
            limit(opened.members[name], parse_bytes(lent) + BESIDES_BYTES)
        yield opened


def limit(process: Process, more_bytes: int) -> None:
    """From outside, on what it takes besides what it has."""
    import resource

    status = Path(f"/proc/{process.process.pid}/status").read_text(encoding="utf-8")
    found = re.search(r"VmData:\s+(\d+) kB", status)
    assert found is not None
    allowed = int(found[1]) * 1024 + more_bytes
    resource.prlimit(process.process.pid, resource.RLIMIT_DATA, (allowed, allowed))


def recipe(directory: Path, lender: str = "roomy", **changes: object) -> Path:
    """Of a job that only `lender` may run."""
    write_text(directory / "text.txt", lines=3000)
    return write_recipe(
        directory / "r.toml",
        model__config=dict(MODEL),
        data__sequence_length=512,
        train__batch_size=8,
        train__microbatches=2,
        job__steps=4,
        placement={"loss": "pool", "excluded": [name for name in LENDERS if name != lender]},
        **changes,
    )


def needed(message: str) -> float:
    """The bytes the model needs, as a refusal says them."""
    found = re.search(rf"needs(?: at least)? {_SIZE}", message)
    assert found is not None, message
    return parse_bytes("".join(found.groups()))


def test_a_third_of_the_memory_is_enough_and_the_limit_holds(pool: LivePool, tmp_path: Path) -> None:
    plain = fusion(
        *("train", recipe(tmp_path, train__recompute="never", train__offload="never"), "--home", pool.owner),
        *("--threads", 1),
    )
    assert plain.code != 0
    assert "are missing" in plain.err
    assert needed(plain.err) >= 3 * parse_bytes(LENT)
    figures = tmp_path / "figures.json"
    done = fusion("train", recipe(tmp_path), "--home", pool.owner, "--threads", 1, "--json", figures)
    assert done.code == 0, done.err + done.out
    told = json.loads(figures.read_text())
    assert told["steps"] == 4
    assert told["losses"][-1] < told["losses"][0]
    (stage,) = told["plan"]["stages"]
    assert (stage["recompute"], stage["offload"]) == (True, True)
    assert "recomputes activations in backward" in done.out
    assert "optimizer state in a file" in done.out
    assert pool.members["roomy"].lives


def test_where_state_in_a_file_is_not_enough_weights_come_and_go_and_the_limit_holds(
    pool: LivePool, tmp_path: Path
) -> None:
    without = fusion(
        *("train", recipe(tmp_path, "narrow", train__offload_weights="never"), "--home", pool.owner),
        *("--threads", 1),
    )
    assert without.code != 0
    assert re.search(rf"{_SIZE} are missing", without.err), without.err
    figures = tmp_path / "figures.json"
    done = fusion("train", recipe(tmp_path, "narrow"), "--home", pool.owner, "--threads", 1, "--json", figures)
    assert done.code == 0, done.err + done.out
    told = json.loads(figures.read_text())
    assert told["steps"] == 4
    assert told["losses"][-1] < told["losses"][0]
    (stage,) = told["plan"]["stages"]
    assert (stage["recompute"], stage["offload"], stage["offload_weights"]) == (True, True, True)
    assert "keeps its weights in a file until a block needs them" in done.out
    assert pool.members["narrow"].lives


def test_below_that_it_is_refused_with_the_missing_bytes(pool: LivePool, tmp_path: Path) -> None:
    refused = fusion(
        *("train", recipe(tmp_path, "cramped"), "--home", pool.owner),
        *("--threads", 1),
    )
    assert refused.code != 0
    assert re.search(rf"{_SIZE} are missing", refused.err), refused.err
    assert pool.members["cramped"].lives
