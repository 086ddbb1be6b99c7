"""`fusion pool --ledger` after real jobs: its sums are those of the journal and of the gateway, and a machine that lies
gets nothing."""

from __future__ import annotations

import csv
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fusionai.storage.commits import read_commits
from harness import lying_peer
from harness.fault_proxy import free_port
from harness.live_pool import PATIENCE_S, LivePool, Process, fusion, write_recipe, write_text
from harness.saved_model import asked, heard, saved_model, stopped

pytestmark = pytest.mark.slow

STEP_TOKENS = 8 * 32
"""Batch size times sequence length."""
LIED_STEPS = 60
"""Enough that the job does not end before the first spot check, however busy the machine is."""


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LivePool]:
    with LivePool(tmp_path_factory.mktemp("pool"), peers=("ada", "bob", "cleo")) as opened:
        yield opened


@pytest.fixture(autouse=True)
def _own_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FUSION_HOME", str(tmp_path / "default"))


def ledger(pool: LivePool, directory: Path, *more: object) -> dict[str, dict[str, Any]]:
    """The entries by the machine's id, with its name."""
    written = directory / "ledger.json"
    shown = fusion("pool", "--ledger", "--home", pool.owner, "--json", written, *more)
    assert shown.code == 0, shown.err
    found = json.loads(written.read_text())
    assert found["schema"] == "fusionai.ledger/1"
    names = {one["machine"]: one["name"] for one in found["machines"]}
    assert len({one["owner"] for one in found["entries"]}) <= 1
    return {one["machine"]: {**one, "name": names[one["machine"]]} for one in found["entries"]}


def since(before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]], figure: str) -> dict[str, float]:
    grown = {name: one[figure] - before.get(name, {}).get(figure, 0) for name, one in after.items()}
    return {name: count for name, count in grown.items() if count}


def train(pool: LivePool, directory: Path, **settings: object) -> dict[str, Any]:
    write_text(directory / "text.txt")
    recipe = write_recipe(directory / "r.toml", train__batch_size=8, **settings)
    out = directory / "out.json"
    trained = fusion("train", recipe, "--home", pool.owner, "--threads", 1, "--json", out)
    assert trained.code == 0, trained.err
    return {**json.loads(out.read_text()), "said": trained.out}


def test_sums_are_those_of_the_journalled_steps_and_exports_are_signed(pool: LivePool, tmp_path: Path):
    before = ledger(pool, tmp_path)
    done = train(pool, tmp_path, job__steps=4, placement={"stages": 2})
    steps = len(read_commits(tmp_path / "run" / "journal.sqlite"))
    assert steps == len(done["losses"]) == 4
    after = ledger(pool, tmp_path, "--csv", tmp_path / "ledger.csv")
    workers = {stage["peer"] for stage in done["plan"]["stages"] if stage["roles"] == ["stage"]}
    assert len(workers) == 2
    assert since(before, after, "steps") == dict.fromkeys(workers, steps)
    assert since(before, after, "tokens") == dict.fromkeys(workers, steps * STEP_TOKENS)
    assert set(since(before, after, "flops")) == workers
    assert all(seconds > 0 for seconds in since(before, after, "lent_s").values())
    assert not since(before, after, "struck_flops")

    with (tmp_path / "ledger.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["machine"]: int(row["steps"]) for row in rows} == {name: one["steps"] for name, one in after.items()}
    exported = tmp_path / "ledger.json"
    checked = fusion("pool", "--ledger", "--verify", exported, "--home", pool.owner)
    assert (checked.code, "Signed by this pool's authority." in checked.out) == (0, True), checked.err
    changed = json.loads(exported.read_text())
    changed["entries"][0]["steps"] += 1
    exported.write_text(json.dumps(changed))
    refused = fusion("pool", "--ledger", "--verify", exported, "--home", pool.owner)
    assert (refused.code, "entries differ" in refused.err) == (1, True), refused.err

    pool.broker.end()
    pool.open_broker()
    assert {name: one["steps"] for name, one in ledger(pool, tmp_path).items()} == {
        name: one["steps"] for name, one in after.items()
    }


def test_a_machine_that_lies_gets_nothing(pool: LivePool, tmp_path: Path):
    before = ledger(pool, tmp_path)
    pool.start("eve", pool.invite(), program=(lying_peer.__file__, "scales", 0.5)).wait_for("In pool")
    done = train(pool, tmp_path, job__steps=LIED_STEPS, placement={"stages": 2, "required": ["eve"]})
    pool.kill("eve")
    assert done["faults"], done["said"]
    (fault,) = done["faults"]
    assert (fault["kind"], fault["name"]) == ("faulty", "eve")
    after = ledger(pool, tmp_path)
    eve = next(one for one in after.values() if one["name"] == "eve")
    assert (eve["steps"], eve["tokens"], eve["flops"]) == (0, 0, 0)
    assert eve["lent_s"] > 0
    honest = since(before, after, "steps")
    assert LIED_STEPS in honest.values(), "the machine of the other stage ran every committed step"
    assert sum(honest.values()) <= 2 * LIED_STEPS


def test_a_served_models_tokens_are_those_the_gateway_counted(pool: LivePool, tmp_path: Path):
    before = ledger(pool, tmp_path)
    figures = tmp_path / "serve.json"
    server = Process(
        *("serve", saved_model(tmp_path / "tiny"), "--context", 128, "--sessions", 4, "--port", 0, "--stages", 2),
        *("--home", pool.owner, "--json", figures),
    )
    try:
        heard(server, "curl ")
        ready = json.loads(figures.read_text())
        usages = [asked(ready["url"], text)["usage"] for text in ("a pool of", "frogs near a bridge", "a pool of")]
        server.interrupt()
        assert server.ended() == 0
    finally:
        stopped(server)
    counted = sum(
        one["total_tokens"] - (one.get("prompt_tokens_details") or {}).get("cached_tokens", 0) for one in usages
    )
    workers = {stage["peer"] for stage in ready["plan"]["stages"] if stage["roles"] == ["stage"]}
    tokens = since(before, ledger(pool, tmp_path), "tokens")
    assert tokens == dict.fromkeys(workers, counted)


def test_what_the_relay_copied_counts_for_the_brokers_machine(tmp_path: Path):
    with LivePool(tmp_path) as relayed:
        for name in ("one", "two"):
            # What they announce leads nowhere, as behind a router without a forwarded port.
            relayed.start(name, relayed.invite(), "--address", f"127.0.0.1:{free_port()}", "--relay")
        for name in ("one", "two"):
            relayed.members[name].wait_for("In pool")
        train(relayed, tmp_path, job__steps=3, placement={"stages": 2})
        assert len(ledger(relayed, tmp_path)) == 2
        deadline_s = time.monotonic() + PATIENCE_S  # a relayed connection counts when it has ended
        while not (found := copied(relayed, tmp_path)):
            assert time.monotonic() < deadline_s
        assert len(found) == 1
        assert not set(found) & set(ledger(relayed, tmp_path)), "the broker's machine has lent nothing else"
        assert max(found.values()) > 10_000
        assert "relayed" in fusion("pool", "--ledger", "--home", relayed.owner).out


def copied(pool: LivePool, directory: Path) -> dict[str, int]:
    """What machines have relayed, by id."""
    ledger(pool, directory)
    machines = json.loads((directory / "ledger.json").read_text())["machines"]
    return {one["machine"]: one["relayed_bytes"] for one in machines if one["relayed_bytes"]}
