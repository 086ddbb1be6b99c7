"""Log-probabilities of `POST /v1/completions`: an entry for each of the best tokens, whatever their texts are."""

from __future__ import annotations

from pathlib import Path

from fusionai.gateway.completions import _CompletionForm  # pyright: ignore[reportPrivateUsage]
from fusionai.gateway.context import Heading
from fusionai.gateway.generation import AnswerLogprob, Delta
from fusionai.serving.interface import TokenLogprob
from fusionai.serving.model_text import ModelText
from harness.tiny_text import write_tiny_text

HEADING = Heading(
    answer_id="cmpl-1",
    created=0,
    model="tiny",
    is_stream=False,
    with_usage=False,
    with_route=False,
    with_logprobs=True,
)


def test_tokens_with_the_same_text_have_an_entry_each(tmp_path: Path) -> None:
    text = write_tiny_text(tmp_path, marks=(" ",))
    ids = {name: text.tokenizer.encode(name, framed=False)[0] for name in ("a", "b")}
    begun = [token for token in range(300) if text.tokenizer.token_bytes(token) in (b"\xc3", b"\xe2")]
    spaces = [token for token in range(400) if text.tokenizer.token_bytes(token) == b" "]
    assert (len(begun), len(spaces)) == (2, 2)
    best = (*begun, *spaces, ids["a"], 9999)

    def lists(text: ModelText, token: int) -> tuple[list[str], list[dict[str, float] | None]]:
        row = TokenLogprob(token, -1.0, tuple((one, -1.0 - place) for place, one in enumerate(best)))
        form = _CompletionForm(text, HEADING, [None])
        found = form.whole(Delta(0, "x", logprobs=(AnswerLogprob(row, 0),)), None).logprobs
        assert found is not None
        return found.tokens, found.top_logprobs

    tokens, (entries,) = lists(text, ids["b"])
    assert tokens == ["b"]
    expected = {
        r"bytes:\xc3": -1.0,
        r"bytes:\xe2": -2.0,
        " ": -3.0,
        f"token_id:{spaces[1]}": -4.0,
        "a": -5.0,
        "token_id:9999": -6.0,
    }
    assert entries is not None
    assert (entries, list(entries)) == (expected, list(reversed(expected)))
    # The chosen token has its text, so that a client finds it among the best.
    tokens, (entries,) = lists(text, spaces[1])
    assert tokens == [" "]
    assert entries is not None
    assert (entries[" "], entries[f"token_id:{spaces[0]}"]) == (-4.0, -3.0)
