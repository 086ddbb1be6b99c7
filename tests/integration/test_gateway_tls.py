"""The gateway over TLS: clients check its certificate, streams arrive, and what can't be used is said before the start.

Neighbours: `harness.certificates` makes certificates, `test_gateway_api` has what endpoints answer.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from pathlib import Path

import httpx
import pytest

from fusionai.gateway.config import GatewayConfig, RequestLimits
from fusionai.gateway.server import open_listener, tls_context
from fusionai.primitives.errors import UsageError
from harness.certificates import self_signed
from harness.gateway_stand import LIMIT_S, chat, gateway_stand
from harness.scripted_engine import ScriptedEngine

CHAT = "/v1/chat/completions"


def test_answers_and_streams_arrive_over_tls(engine: ScriptedEngine, tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path)

    async def scenario() -> None:
        trusting = ssl.create_default_context(cafile=str(certificate))
        async with gateway_stand(engine, tls=tls_context(certificate, key)) as stand:
            assert stand.url.startswith("https://127.0.0.1:")
            async with httpx.AsyncClient(base_url=stand.url, verify=trusting) as http:
                whole = (await http.post(CHAT, json=chat())).json()["choices"][0]["message"]["content"]
                streamed = (await http.post(CHAT, json=chat(stream=True))).text
            assert whole
            assert streamed.rstrip().endswith("data: [DONE]")
            with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
                async with httpx.AsyncClient(base_url=stand.url, trust_env=False) as stranger:
                    await stranger.get("/health")
            with pytest.raises(httpx.HTTPError):
                async with httpx.AsyncClient() as clear:
                    await clear.get(stand.url.replace("https", "http") + "/health")

    asyncio.run(scenario())


def test_old_protocols_are_refused(tmp_path: Path) -> None:
    assert tls_context(*self_signed(tmp_path)).minimum_version is ssl.TLSVersion.TLSv1_2


@pytest.mark.slow
def test_a_handshake_that_does_not_come_ends_the_connection(engine: ScriptedEngine, tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path)

    async def scenario() -> None:
        config = GatewayConfig("tiny", limits=RequestLimits(head_timeout_s=0.2))
        async with gateway_stand(engine, config, tls_context(certificate, key)) as stand:
            reader, writer = await asyncio.open_connection("127.0.0.1", stand.port)
            async with asyncio.timeout(LIMIT_S):
                assert await reader.read() == b""
            writer.close()

    asyncio.run(scenario())


def test_beyond_this_machine_tls_or_a_decision_is_needed() -> None:
    with pytest.raises(UsageError, match="without TLS, API keys, prompts and answers travel in clear text") as refused:
        open_listener("0.0.0.0", 0, has_keys=True)
    assert refused.value.hint is not None
    assert "--tls-cert" in refused.value.hint
    for allowed in ({"has_tls": True}, {"clear_text": True}):
        listener, url = open_listener("0.0.0.0", 0, has_keys=True, **allowed)
        listener.close()
        assert url.startswith("https" if "has_tls" in allowed else "http:")
    with pytest.raises(UsageError, match="without API keys"):
        open_listener("0.0.0.0", 0, has_keys=False, has_tls=True)
    listener, _ = open_listener("127.0.0.1", 0, has_keys=False)
    assert isinstance(listener, socket.socket)
    listener.close()


def test_files_that_can_not_be_used_are_named(tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path / "a")
    _, foreign = self_signed(tmp_path / "b")
    old, old_key = self_signed(tmp_path / "c", days=-1)
    later, later_key = self_signed(tmp_path / "d", days=40)
    hidden, hidden_key = self_signed(tmp_path / "e", passphrase=b"secret")
    text = tmp_path / "text.pem"
    text.write_text("no certificate")
    for pair, reason in (
        ((tmp_path / "nowhere.pem", key), "nowhere.pem: the TLS certificate can't be read"),
        ((certificate, tmp_path / "nowhere.pem"), "nowhere.pem: the TLS private key can't be read"),
        ((certificate, foreign), "the key is another certificate's"),
        ((text, key), "expected a certificate and a key in PEM form"),
        ((certificate, text), "expected a certificate and a key in PEM form"),
        ((key, key), "expected a certificate and a key in PEM form"),
        ((old, old_key), "the TLS certificate is valid from"),
        ((later, later_key), "the TLS certificate is valid from"),
        ((hidden, hidden_key), "the TLS private key is encrypted with a passphrase"),
    ):
        with pytest.raises(UsageError, match=reason):
            tls_context(*pair)
