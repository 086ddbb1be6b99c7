"""A text that is far too long is known as such without reading it all; one that may fit never is."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.tiny_text import write_tiny_text


@pytest.mark.slow
@pytest.mark.parametrize("text", ["x", "the weather in Paris is fine, ", " ", "é", "<|im_end|>"])
@pytest.mark.parametrize("characters", [100, 40_000, 100_000])
def test_what_may_fit_is_never_beyond(tmp_path: Path, text: str, characters: int) -> None:
    tokenizer = write_tiny_text(tmp_path).tokenizer
    whole = (text * characters)[:characters]
    tokens = len(tokenizer.encode(whole, framed=False, trusted=False))
    assert not tokenizer.is_beyond(whole, tokens)


def test_what_is_far_longer_is_known_after_its_beginning(tmp_path: Path) -> None:
    tokenizer = write_tiny_text(tmp_path).tokenizer
    read: list[int] = []
    encode = tokenizer.encode
    tokenizer.encode = lambda text, **options: (read.append(len(text)), encode(text, **options))[1]  # type: ignore[method-assign]
    assert tokenizer.is_beyond("x" * 5_000_000, 4096)
    assert sum(read) < 100_000
