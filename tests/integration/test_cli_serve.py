"""`fusion serve MODEL --local` as people use it: real processes, transformers' own tokens, a kill, the chat, Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest

from harness.live_pool import Process
from harness.patience import CEILING_S
from harness.saved_model import asked, greedy, heard, saved_model, stopped
from harness.slow_machine import standing_still

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.mark.timeout(1200)
def test_a_local_pool_serves_transformers_tokens_and_outlives_a_peer(model: Path, tmp_path: Path) -> None:
    home, figures = tmp_path / "home", tmp_path / "serve.json"
    server = Process(
        *("serve", model, "--local", 2, "--context", 128, "--sessions", 4, "--port", 0),
        *("--home", home, "--json", figures),
    )
    try:
        heard(server, "curl ")
        ready = json.loads(figures.read_text())
        assert (ready["schema"], ready["model"]) == ("fusionai.serve/1", "tiny")
        assert [stage["roles"] for stage in ready["plan"]["stages"]] == [["feed"], ["stage"], ["stage"], ["loss"]]
        expected = greedy(model, "a pool of")
        first = asked(ready["url"], "a pool of")
        assert first["choices"][0]["text"] == expected
        names = [ready["peers"][stage["peer"]] for stage in ready["plan"]["stages"]]
        assert first["fusion"]["route"] == names

        # Longer than a healthy machine is silent: its passes are waited for, nobody is given up.
        stages = [ready["local_pids"][name] for name in names[1:3]]
        for _ in range(2):
            with standing_still(stages, still_s=1.5, going_s=0.4):
                slow = asked(ready["url"], "a pool of")
            assert slow["choices"][0]["text"] == expected
            assert slow["fusion"]["route"] == names
        assert "given up" not in server.text

        heard(server, "as a spare")
        os.kill(ready["local_pids"][names[1]], signal.SIGKILL)
        again = asked(ready["url"], "a pool of")
        assert again["choices"][0]["text"] == expected
        assert again["fusion"]["route"][1] not in (names[1], names[2])
        heard(server, "no tokens for")

        talk = subprocess.run(
            [sys.executable, "-m", "fusionai", "chat", "--url", ready["url"], "--max-tokens", "4"],
            input="/peers\nhello\n/peers\n/quit\n",
            capture_output=True,
            text=True,
            timeout=CEILING_S,
            check=False,
        )
        assert talk.returncode == 0, talk.stderr
        assert "tiny: ready" in talk.stdout
        assert "Route of the last answer: job owner > " in talk.stdout
        server.interrupt()
        assert server.ended() == 0
        ended = json.loads(figures.read_text())
        assert {key: ended[key] for key in ready} == ready
        # On a busy machine the peers' speeds may call for another plan in between.
        assert sum(row["answers"] for row in ended["observed"]) >= 4
        row = next(row for row in ended["observed"] if row["version"] == ready["plan"]["version"])
        assert (row["answers"] >= 1, row["at_once"]) == (True, 1.0)
        assert 0 < row["measured_first_token_s"] < 60
        assert row["measured_tokens_per_s"] > 0
        assert row["predicted_tokens_per_s"] == pytest.approx(ready["plan"]["tokens_per_s"], rel=0.5)
        assert "Predicted and measured" in server.text
        assert [left.name for left in (home / "local").iterdir()] == ["measurement.json"]
    finally:
        stopped(server)


@pytest.mark.timeout(1200)
def test_clients_of_every_api_get_the_same_answer(model: Path, tmp_path: Path) -> None:
    anthropic, ollama, openai = (pytest.importorskip(name) for name in ("anthropic", "ollama", "openai"))
    figures = tmp_path / "serve.json"
    server = Process(
        *("serve", model, "--local", 1, "--context", 128, "--sessions", 2, "--port", 0),
        *("--home", tmp_path / "home", "--json", figures),
    )
    said = [{"role": "user", "content": "a pool of"}]
    try:
        heard(server, "curl ")
        url = json.loads(figures.read_text())["url"]
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=CEILING_S) as api:
            chat = api.chat.completions.create(model="tiny", messages=said, temperature=0, max_tokens=12)
        expected = chat.choices[0].message.content
        assert expected
        sampling = {"temperature": 0}
        with (
            anthropic.Anthropic(base_url=url, api_key="none", timeout=CEILING_S) as api,
            api.messages.stream(model="tiny", messages=said, max_tokens=12, extra_body=sampling) as stream,
        ):
            message = stream.get_final_message()
        assert [block.text for block in message.content] == [expected]
        assert message.usage.output_tokens == chat.usage.completion_tokens
        with ollama.Client(host=url, timeout=CEILING_S) as api:
            lines = list(api.chat("tiny", said, stream=True, options={**sampling, "num_predict": 12}))
        assert "".join(line.message.content for line in lines) == expected
        assert lines[-1].eval_count == chat.usage.completion_tokens
        server.interrupt()
        assert server.ended() == 0
    finally:
        stopped(server)


OWNER = """
import asyncio, sys
from pathlib import Path
from fusionai.client.pool.local_pool import LocalPeer, LocalPool

async def main():
    async with LocalPool(Path(sys.argv[1]), [LocalPeer("tower", memory_bytes=100_000_000)]) as pool:
        print(*pool.pids.values(), flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.timeout(1200)
@pytest.mark.skipif(sys.platform == "win32", reason="asks the system for processes as POSIX does")
def test_a_pool_ends_with_its_owner_however_that_ends(tmp_path: Path) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    pids: list[int] = []
    try:
        assert owner.stdout is not None
        pids = [int(word) for word in owner.stdout.readline().split()]
        assert len(pids) == 2
        assert all(psutil.pid_exists(pid) for pid in pids)
        owner.kill()
        owner.wait()
        _, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=CEILING_S)
        assert not alive
        assert "Left the pool." in (tmp_path / "tower.log").read_text()
    finally:
        owner.kill()
        owner.communicate()
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("ignore::FutureWarning:transformers.*")
def test_adapters_are_chosen_by_a_requests_model(model: Path, tmp_path: Path) -> None:
    """Each answers as transformers does with it merged into the model, also one that is loaded while it is served."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    merged: dict[str, Path] = {"tiny": model}
    options: list[object] = []
    for number, name in enumerate(("law", "poems", "songs")):
        tuned = get_peft_model(
            AutoModelForCausalLM.from_pretrained(model), LoraConfig(r=4 + number, target_modules="all-linear")
        )
        torch.manual_seed(number)
        with torch.no_grad():
            for key, parameter in tuned.named_parameters():
                if ".lora_" in key:
                    parameter.copy_(0.2 * torch.randn_like(parameter))
        tuned.save_pretrained(str(tmp_path / name))
        options += [] if name == "songs" else ["--adapter", f"{name}={tmp_path / name}"]
        merged[name] = tmp_path / f"{name}-merged"
        tuned.merge_and_unload().save_pretrained(merged[name])
        for tokenizer in model.glob("tokenizer*"):
            (merged[name] / tokenizer.name).write_bytes(tokenizer.read_bytes())
    figures = tmp_path / "serve.json"
    server = Process(
        *("serve", model, "--local", 2, "--context", 128, "--sessions", 4, "--port", 0, *options),
        *("--home", tmp_path / "home", "--json", figures, "--adapter-directory", tmp_path, "--adapter-rank", 8),
    )
    try:
        heard(server, "curl ")
        ready = json.loads(figures.read_text())
        assert ready["adapters"] == ["law", "poems"]
        loading = {"lora_name": "songs", "lora_path": "songs"}
        loaded = httpx.post(f"{ready['url']}/v1/load_lora_adapter", json=loading, timeout=CEILING_S, trust_env=False)
        assert loaded.status_code == 200, loaded.text
        answers = {name: asked(ready["url"], "a pool of", name)["choices"][0]["text"] for name in merged}
        assert answers == {name: greedy(directory, "a pool of") for name, directory in merged.items()}
        assert len(set(answers.values())) == 4
        server.interrupt()
        assert server.ended() == 0
    finally:
        stopped(server)
