"""Reads the forms of a prompt (a text, several texts, tokens of one, tokens of several) as lists of tokens.

Neighbours: `completions` and `embeddings`.
"""

from __future__ import annotations

from collections.abc import Sequence

from fusionai.gateway.asking import check_length, check_tokens, off_loop
from fusionai.gateway.errors import invalid
from fusionai.serving.interface import Engine
from fusionai.serving.model_text import ModelText


async def prompts_of(
    given: str | list[str | int | list[int]], text: ModelText, engine: Engine, param: str
) -> list[tuple[int, ...]]:
    """Return one or more prompts as tokens, none of them empty. Raises `ApiError`."""
    if isinstance(given, str):
        prompts = await _texts([given], text, engine, param)
    elif all(isinstance(part, str) for part in given):
        prompts = await _texts([part for part in given if isinstance(part, str)], text, engine, param)
    elif all(isinstance(part, int) for part in given):
        prompts = [tuple(part for part in given if isinstance(part, int))]
    elif all(isinstance(part, list) for part in given):
        prompts = [tuple(part) for part in given if isinstance(part, list)]
    else:
        raise invalid(
            f"`{param}` must be a text, texts, tokens or lists of tokens, not a mixture.", param, "invalid_type"
        )
    for prompt in prompts:
        if not prompt:
            raise invalid(f"`{param}` is empty: expected at least one token.", param)
        check_tokens(prompt, engine.vocabulary, param)
    return prompts


async def _texts(texts: Sequence[str], text: ModelText, engine: Engine, param: str) -> list[tuple[int, ...]]:
    prompts: list[tuple[int, ...]] = []
    for one in texts:
        await check_length([one], text, engine, param)
        prompts.append(await off_loop(len(one), text.text_tokens, one))
    return prompts
