"""`fusion chat` against a gateway of the test's own: streams, notes, routes, refusals, plain lines."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from fusionai.cli.main import main
from fusionai.cli.serving.chat_client import (
    AnswerPart,
    AnswerPiece,
    ApiRefusal,
    ChatAnswer,
    ChatClient,
    Message,
    Note,
    ThinkingPiece,
)
from fusionai.primitives.errors import TransportError

ROUTE = {
    "route": ["me", "ada", "bob"],
    "hops": [
        {"stage": 0, "peer": "me", "tokens": 3, "queued_s": 0.001, "compute_s": 0.002, "transfer_s": 0.0},
        {"stage": 1, "peer": "ada", "tokens": 3, "queued_s": 0.001, "compute_s": 0.02, "transfer_s": 0.003},
    ],
    "first_token_s": 0.1,
    "total_s": 0.5,
    "tokens_per_s": 12.5,
    "waits": [{"at_s": 0.2, "state": "recovering", "detail": "bob is gone"}],
}
STATUS = {
    "model": "tiny",
    "engine": {
        "state": "ready",
        "tokens_per_s": 3.0,
        "stages": [
            {
                "stage": 1, "name": "ada", "blocks": [1, 4], "state": "running", "spare": "cyd",
                "resident_bytes": 1000, "mean_compute_s": 0.002,
            }
        ],
    },
}  # fmt: skip


@dataclass
class Gateway:
    """`lines` is the stream it answers with; `asked` what it was asked."""

    lines: list[str] = field(default_factory=list)
    status: int = 200
    room: int = 4096
    asked: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    address: str = ""
    models: tuple[str, ...] = ("tiny",)


def chunk(text: str | None = None, **more: object) -> str:
    choices = [] if text is None else [{"index": 0, "delta": {"content": text}, "finish_reason": None}]
    return "data: " + json.dumps({"choices": choices, **more})


def ending(finish: str = "stop") -> list[str]:
    last = {"index": 0, "delta": {}, "finish_reason": finish}
    return [
        "data: " + json.dumps({"choices": [last]}),
        chunk(usage={"completion_tokens": 3}, fusion=ROUTE),
        "data: [DONE]",
    ]


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    told = Gateway()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            told.keys.append(self.headers.get("Authorization"))
            if told.status == 401:
                self._answer(401, {"error": {"message": "The API key is not valid for this gateway."}})
                return
            self._answer(200, {"data": [{"id": each} for each in told.models]} if self.path == "/v1/models" else STATUS)

        def do_POST(self) -> None:
            told.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            if told.status != 200 or told.asked[-1].get("max_tokens", 0) > told.room:
                problem = {"message": "The prompt is too long.", "type": "x", "code": "context_length_exceeded"}
                self._answer(400, {"error": problem})
                return
            self.send_response(200)
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write("\n\n".join([*told.lines, ""]).encode())
            self.close_connection = True

        def _answer(self, status: int, body: object) -> None:
            content = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    told.address = f"http://127.0.0.1:{server.server_address[1]}"
    yield told
    server.shutdown()
    thread.join()
    server.server_close()


def parts(client: ChatClient) -> list[AnswerPart]:
    return list(client.answer([Message("user", "hi")], max_tokens=5, temperature=0.0, seed=7))


def test_an_answer_comes_in_pieces_with_its_route(gateway: Gateway) -> None:
    gateway.lines = [chunk("Hel"), ": still here", ": recovering: bob is gone", chunk("lo"), *ending()]
    with ChatClient(gateway.address, "secret") as client:
        found = parts(client)
    assert found[:3] == [AnswerPiece("Hel"), Note("recovering: bob is gone"), AnswerPiece("lo")]
    answer = found[3]
    assert isinstance(answer, ChatAnswer)
    assert (answer.completion_tokens, answer.finish) == (3, "stop")
    assert answer.route is not None
    assert answer.route.route == ("me", "ada", "bob")
    assert gateway.keys == ["Bearer secret"]
    assert gateway.asked[0]["fusion_route"] is True
    assert (gateway.asked[0]["temperature"], gateway.asked[0]["seed"]) == (0.0, 7)


def test_thinking_is_apart_from_the_answer(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    thought = 'data: {"choices": [{"index": 0, "delta": {"reasoning_content": "Hm, \\u001b"}}]}'
    gateway.lines = [thought, chunk("Hello"), *ending()]
    with ChatClient(gateway.address, None) as client:
        assert parts(client)[:2] == [ThinkingPiece("Hm, \x1b"), AnswerPiece("Hello")]
    said = iter(["hi", "again", "/quit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(said))
    assert main(["chat", "--url", gateway.address]) == 0
    shown = capsys.readouterr()
    assert shown.out == "Hello\nHello\n"
    assert shown.err == "Hm, \N{REPLACEMENT CHARACTER}\n\n" * 2
    # Thinking is no part of the conversation.
    assert gateway.asked[2]["messages"][1] == {"role": "assistant", "content": "Hello"}


def test_what_the_gateway_refuses_is_said_in_its_words(gateway: Gateway) -> None:
    gateway.status = 400
    with ChatClient(gateway.address, None) as client:
        with pytest.raises(ApiRefusal, match=r"The prompt is too long\."):
            parts(client)
        gateway.status, gateway.lines = 200, [chunk("x"), 'data: {"error": {"message": "The pool is gone."}}']
        with pytest.raises(ApiRefusal, match=r"The pool is gone\."):
            parts(client)


def test_a_wrong_key_is_refused_with_the_flag_that_sets_it(
    gateway: Gateway, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.status = 401
    assert main(["chat", "--url", gateway.address]) == 1
    assert "The API key is not valid for this gateway.\nName a file with a valid key: --api-key-file" in (
        capsys.readouterr().err
    )


def test_a_stream_that_breaks_off_is_no_answer(gateway: Gateway) -> None:
    gateway.lines = [chunk("Hel")]
    with ChatClient(gateway.address, None) as client, pytest.raises(TransportError, match="in the middle"):
        parts(client)


def test_an_interrupt_before_the_first_word_closes_the_connection(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the gateway would go on with an answer that nobody reads."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with ChatClient(gateway.address, None) as client:
        with monkeypatch.context() as patched:
            patched.setattr(client._connection, "getresponse", interrupted)
            with pytest.raises(KeyboardInterrupt):
                parts(client)
        assert client._connection.sock is None
        gateway.lines = [chunk("Hel"), *ending()]
        assert parts(client)[0] == AnswerPiece("Hel")


def test_a_conversation_in_plain_lines(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = iter(["/peers", "hi", "", "again", "/peers", "/new", "fresh", "/what", "/quit", "never"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(said))
    gateway.lines = [chunk("Good \x1b[31mday"), *ending()]
    assert main(["chat", "--url", gateway.address, "--system", "Be brief."]) == 0
    shown = capsys.readouterr().out
    assert "Good \N{REPLACEMENT CHARACTER}[31mday" in shown
    assert "tiny: ready" in shown
    assert "me > ada > bob" in shown
    assert "recovering bob is gone" in shown
    assert "There is no command /what." in shown
    system = {"role": "system", "content": "Be brief."}
    answered = {"role": "assistant", "content": "Good \x1b[31mday"}
    assert gateway.asked[1]["messages"] == [
        system, {"role": "user", "content": "hi"}, answered, {"role": "user", "content": "again"},
    ]  # fmt: skip
    assert gateway.asked[2]["messages"] == [system, {"role": "user", "content": "fresh"}]


def test_a_model_with_little_room_answers_as_far_as_it_goes(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.room = 100
    gateway.lines = [chunk("Hi."), *ending("length")]

    def conversation(*options: str) -> str:
        said = iter(["hi", "/quit"])
        monkeypatch.setattr("builtins.input", lambda prompt: next(said))
        assert main(["chat", "--url", gateway.address, *options]) == 0
        told = capsys.readouterr()
        return told.out + told.err

    assert "Hi." in conversation()
    assert [asked.get("max_tokens") for asked in gateway.asked] == [512, None]
    assert "The prompt is too long." in conversation("--max-tokens", "101")
    assert len(gateway.asked) == 3, "what was asked for is not changed"


def test_nobody_there_and_wrong_use(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", "http://127.0.0.1:9"]) == 1
    assert "no gateway answers at http://127.0.0.1:9: Connection refused.\n" in capsys.readouterr().err
    assert main(["chat", "--url", "ftp://x"]) == 2
    assert main(["chat", "m", "--url", "http://x"]) == 2
    assert main(["chat", "--local", "2"]) == 2


def test_a_picture_goes_with_the_next_question_only(
    gateway: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.lines = [chunk("A cat."), *ending()]
    (tmp_path / "cat.png").write_bytes(b"a picture")
    said = iter([f"/image {tmp_path / 'cat.png'}", "what is it?", "sure?", f"/image {tmp_path / 'dog.png'}", "/quit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(said))
    assert main(["chat", "--url", gateway.address]) == 0
    first, second = (asked["messages"] for asked in gateway.asked)
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,YSBwaWN0dXJl"}}
    assert first == [{"role": "user", "content": [picture, {"type": "text", "text": "what is it?"}]}]
    assert second == [*first, {"role": "assistant", "content": "A cat."}, {"role": "user", "content": "sure?"}]
    printed = capsys.readouterr().out
    assert "cat.png goes with the next question." in printed
    assert "dog.png: the picture can't be read: No such file" in printed


def test_a_gateways_other_models_and_adapters_are_chosen_by_name(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.models = ("qwen", "qwen-poems", "llama")
    said = iter(["hi", "/model", "/model lama", "/model llama", "again", "/quit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(said))
    gateway.lines = [chunk("Good day"), *ending()]
    assert main(["chat", "--url", gateway.address, "--model", "qwen-poems"]) == 0
    shown = capsys.readouterr().out
    assert "  qwen\n* qwen-poems\n  llama\n" in shown
    assert "Did you mean 'llama'?" in shown
    assert "llama answers from here on." in shown
    assert [one["model"] for one in gateway.asked] == ["qwen-poems", "llama"]
    assert len(gateway.asked[1]["messages"]) == 3
    assert main(["chat", "--url", gateway.address, "--model", "qwen-poem"]) == 2
    assert "Did you mean 'qwen-poems'?" in capsys.readouterr().err
    assert main(["chat", "./model", "--model", "qwen"]) == 2
