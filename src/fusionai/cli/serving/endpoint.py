"""Where the API of `fusion serve` listens, who may use it, and what is announced of it on the terminal and in `--json`.

`cli.serving.serve` runs the job behind it, `gateway.server` the HTTP server.
"""

from __future__ import annotations

import json
import shlex
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fusionai.cli import console
from fusionai.cli.options import write_json
from fusionai.cli.planning.view import privacy_figures, privacy_lines
from fusionai.ir.serving import Purpose
from fusionai.primitives.errors import UsageError

if TYPE_CHECKING:
    import ssl

    from fusionai.cli.serving.view import ServingObservation
    from fusionai.client.serving.serve import Served
    from fusionai.gateway.config import KeyRing

_HELLO: Final = {"messages": [{"role": "user", "content": "Hello"}], "stream": True}
_EXAMPLES: Final[Mapping[Purpose, tuple[str, Mapping[str, Any]]]] = {
    "generate": ("chat/completions", _HELLO),
    "embed": ("embeddings", {"input": "Hello"}),
    "score": ("rerank", {"query": "Hello", "documents": ["Good day", "Good night"]}),
}
"""A request for each kind of model: path and fields."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiEndpoint:
    """Where the API listens and who may use it. `name`: the model's name for clients, None: its own name. `clear_text`:
    other machines may connect without TLS. `strict`: requests with unknown fields are refused. `image_urls`: images are
    fetched if requests name them by URLs. `behind_gateway`: another process of this command forwards requests to it."""

    host: str
    port: int
    key_file: Path | None
    tls_certificate: Path | None
    tls_key: Path | None
    clear_text: bool
    strict: bool
    image_urls: bool
    name: str | None
    behind_gateway: bool


def opened(endpoint: ApiEndpoint, json_file: Path | None) -> OpenEndpoint:
    """Return the reserved address with its keys and certificate. They are checked before a model is loaded, which takes
    minutes."""
    from fusionai.gateway.config import KeyRing
    from fusionai.gateway.server import open_listener

    if endpoint.key_file is not None and not endpoint.key_file.is_file():
        raise UsageError(f"--api-key-file: there is no file {endpoint.key_file}.")
    keys = None if endpoint.key_file is None else KeyRing.load(endpoint.key_file)
    tls = _tls(endpoint)
    listener, url = open_listener(
        endpoint.host,
        endpoint.port,
        has_keys=keys is not None,
        has_tls=tls is not None,
        clear_text=endpoint.clear_text,
    )
    return OpenEndpoint(endpoint, listener, url, keys, tls, json_file)


def _tls(endpoint: ApiEndpoint) -> ssl.SSLContext | None:
    from fusionai.gateway.server import tls_context

    match endpoint.tls_certificate, endpoint.tls_key:
        case None, None:
            return None
        case Path() as certificate, Path() as key:
            if endpoint.clear_text:
                raise UsageError("--clear-text allows clients without TLS: it can't be combined with --tls-cert.")
            return tls_context(certificate, key)
        case _:
            raise UsageError("a certificate and its private key are needed: give --tls-cert and --tls-key, or neither.")


@dataclass(frozen=True, slots=True)
class OpenEndpoint:
    """The API's address, reserved before the model is there, its keys and certificate, and what is announced of it.
    `asked`: the flags."""

    asked: ApiEndpoint
    listener: socket.socket
    url: str
    keys: KeyRing | None
    tls: ssl.SSLContext | None
    json_file: Path | None
    written: dict[str, object] = field(default_factory=dict[str, object])
    """What `--json` has when the model is ready."""

    def announce(self, ready: Served) -> None:
        """Print that the model is ready, with an example of a request, and write `--json`."""
        name, plan = self.asked.name or ready.model.files.name, ready.engine.deployment.plan
        self.written.update(
            url=self.url,
            model=name,
            adapters=[adapter.name for adapter in ready.model.adapters],
            job=ready.job,
            privacy=privacy_figures(ready.privacy, plan),
            plan=plan,
            peers={stage.peer: ready.names.get(stage.peer, stage.peer) for stage in plan.stages},
            local_pids={} if ready.pool is None else ready.pool.pids,
        )
        write_json(self.json_file, "serve", self.written)
        purpose = ready.model.purpose
        source = ready.model.texts.source
        if purpose == "generate" and ready.model.texts.template.is_plain and source is None:
            console.line(f"{name} has no chat template: chats are passed to it as lines of `role: text`.")
        at = "" if self.asked.behind_gateway else f" at {self.url}/v1"
        console.line(f"ready: a probe token has crossed all stages and matched; {name}{at}")
        for sentence in privacy_lines(ready.privacy, plan):
            console.line(sentence)
        if self.asked.behind_gateway:
            return
        console.line(f"page: {self.url}/ (also the base URL for clients of Anthropic and Ollama)")
        key = "" if self.keys is None else " -H 'Authorization: Bearer YOUR-KEY'"
        if source is not None and source.speech is not None:
            form = f"-F {shlex.quote(f'model={name}')} -F file=@SPEECH.wav"
            console.line(f"curl {self.url}/v1/audio/transcriptions{key} {form}")
            return
        path, fields = _EXAMPLES[purpose]
        body = json.dumps({"model": name, **fields})
        quoted = body.replace("'", "'\\''")
        console.line(f"curl {self.url}/v1/{path} -H 'Content-Type: application/json'{key} -d '{quoted}'")

    def conclude(self, ready: Served, observation: ServingObservation) -> None:
        """Print predicted and measured figures, and add them to `--json`."""
        from fusionai.cli.serving.view import show_serving
        from fusionai.cli.training.observation import shared_cores

        deployment, problem = ready.engine.deployment, ready.problem()
        rows = observation.rows(problem, ready.chunk_tokens)
        shared = shared_cores(
            {stage.peer for stage in deployment.plan.stages},
            deployment.members,
            {profile.peer: profile for profile in problem.everyone},
            ready.names,
        )
        guessed = ready.engine.status.extra.get("accepted_tokens", 0.0)
        show_serving(rows, left_out=observation.left_out, guessed=guessed, shared=shared)
        observed = {"observed": rows, "left_out": observation.left_out, "shared_cores": shared or None}
        write_json(self.json_file, "serve", {**self.written, **observed})
