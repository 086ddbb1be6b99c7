"""Programs people measure and build with, against a real pool: lm-eval, guidellm, llama-index, each as it is.

They live in an environment of their own (`make clients`, evals.txt), from which lm-eval also runs transformers on the
same files: its scores over HTTP are those."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.live_pool import Process
from harness.patience import CEILING_S
from harness.saved_model import asked, greedy, heard, saved_model, stopped

EVALS = (
    Path(__file__).parents[2] / ".venv" / "evals" / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
)
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not EVALS.exists(), reason="these programs need an environment of their own: make clients"),
]
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OPENAI_API_KEY": "none", "NO_PROXY": "*"}
TASK = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{text}"
doc_to_target: "{target}"
metric_list: [{{metric: {metric}}}]
"""
CHOICE = "doc_to_choice: choices\n"
UNTIL = 'generation_kwargs: {until: ["s", "\\n\\n"], max_gen_toks: 12, temperature: 0.0, do_sample: false}\n'
LM_EVAL = """
import json, sys
import lm_eval
from lm_eval.tasks import TaskManager

tasks = TaskManager(include_path=sys.argv[3], include_defaults=False)
found = lm_eval.simple_evaluate(
    model=sys.argv[1], model_args=json.loads(sys.argv[2]), tasks=["choice", "until", "rolling"], task_manager=tasks,
    bootstrap_iters=0,
)
samples = {
    name: [[one["doc_id"], one["resps"]] for one in sorted(rows, key=lambda one: one["doc_id"])]
    for name, rows in found["samples"].items()
}
print(json.dumps({"samples": samples, "accuracy": found["results"]["choice"]["acc,none"]}))
"""
LLAMA_INDEX = """
import json, sys
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

def model(is_chat):
    return OpenAILike(
        model="tiny", api_base=sys.argv[1] + "/v1", api_key="none", is_chat_model=is_chat, temperature=0, max_tokens=24,
        context_window=128, additional_kwargs={"extra_body": {"ignore_eos": True}},
    )

said = [ChatMessage(role="user", content="a pool of")]
print(json.dumps({
    "complete": model(False).complete("a pool of").text,
    "streamed": "".join(part.delta for part in model(False).stream_complete("a pool of")),
    "chat": model(True).chat(said).message.content,
    "chat streamed": "".join(part.delta or "" for part in model(True).stream_chat(said)),
}))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def url(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    place = tmp_path_factory.mktemp("served")
    server = Process(
        *("serve", model, "--local", 2, "--context", 128, "--sessions", 4, "--port", 0),
        *("--home", place / "home", "--json", place / "serve.json"),
    )
    try:
        heard(server, "curl ")
        yield json.loads((place / "serve.json").read_text())["url"]
        server.interrupt()
        assert server.ended() == 0
    finally:
        stopped(server)


def run(place: Path, *command: object) -> str:
    """What the program printed; it fails the test if it fails."""
    ran = subprocess.run(
        [str(one) for one in command],
        env={**os.environ, **OFFLINE, "HF_HOME": str(place / "cache"), "PYTHONPATH": ""},
        cwd=place,
        capture_output=True,
        text=True,
        timeout=CEILING_S,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    return ran.stdout


def likelihoods(samples: dict[str, Any]) -> list[float]:
    choices = [found[0][0] for _, answers in samples["choice"] for found in answers]
    return [*choices, *(found[0][0] for _, found in samples["rolling"])]


def test_lm_eval_scores_as_it_does_with_transformers(model: Path, url: str, tmp_path: Path):
    """Likelihoods of choices, of whole texts, and what is generated up to a stop."""
    first = asked(url, "a pool of")["choices"][0]["text"]
    questions = ["a pool of", "peers serve", "a model is", "peers of a pool"]
    rows = [
        {"question": text, "choices": [" peers", " a model serves", first], "label": number % 3}
        for number, text in enumerate(questions)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    for name, kind, text, target, metric, more in (
        ("choice", "multiple_choice", "{{question}}", "label", "acc", CHOICE),
        ("until", "generate_until", "{{question}}", "{{choices[label]}}", "exact_match", UNTIL),
        ("rolling", "loglikelihood_rolling", "", "{{question}} and its peers", "word_perplexity", ""),
    ):
        values = {"name": name, "kind": kind, "text": text, "target": target, "metric": metric}
        (tasks / f"{name}.yaml").write_text(TASK.format(rows=tmp_path / "rows.jsonl", **values) + more)
    served = {"model": "tiny", "base_url": f"{url}/v1/completions", "tokenizer": str(model), "max_length": 128}
    here = {"pretrained": str(model), "dtype": "float32", "device": "cpu", "max_length": 128}
    ours, theirs = (
        json.loads(run(tmp_path, EVALS, "-c", LM_EVAL, kind, json.dumps(options), tasks).splitlines()[-1])
        for kind, options in (("local-completions", served), ("hf", here))
    )
    assert ours["accuracy"] == theirs["accuracy"]
    assert likelihoods(ours["samples"]) == pytest.approx(likelihoods(theirs["samples"]), rel=1e-4)
    assert ours["samples"]["until"] == theirs["samples"]["until"]
    greedily = [
        [found[0][1] for _, answers in both["samples"]["choice"] for found in answers] for both in (ours, theirs)
    ]
    assert greedily[0] == greedily[1]


def test_guidellm_measures_every_request(model: Path, url: str, tmp_path: Path):
    for number, path in enumerate(("/v1/chat/completions", "/v1/completions")):
        report = tmp_path / f"{number}.json"
        run(
            *(tmp_path, EVALS, "-m", "guidellm", "run", "--disable-console"),
            *("--backend", f"kind=openai_http,target={url},model=tiny,request_format={path}"),
            *("--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=6"),
            *("--tokenizer", f"kind=hf_auto,model={model}"),
            *("--data", "kind=synthetic_text,prompt_tokens=24,output_tokens=8", "--output", f"kind=json,path={report}"),
        )
        (benchmark,) = json.loads(report.read_text())["benchmarks"]
        made = benchmark["scheduler_metrics"]["requests_made"]
        assert (made["successful"], made["errored"], made["incomplete"]) == (6, 0, 0), path
        answered = benchmark["requests"]["successful"]
        assert [one["output_tokens"] for one in answered] == [8] * 6, path
        assert all(0 < one["time_to_first_token_ms"] < 1000 * one["request_latency"] for one in answered)


def test_llama_index_completes_and_chats(model: Path, url: str, tmp_path: Path):
    found = json.loads(run(tmp_path, EVALS, "-c", LLAMA_INDEX, url).splitlines()[-1])
    assert found["complete"] == found["streamed"] == greedy(model, "a pool of")
    assert found["chat"] == found["chat streamed"] != ""
