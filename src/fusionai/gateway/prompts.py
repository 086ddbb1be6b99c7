"""What may stand for a prompt (a text, several, the tokens of one, or of several) as tokens. Decides what is a mixture.

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
    """One or more, none of them empty. Raises `ApiError`."""
    if isinstance(given, str):
        prompts = await _texts([given], text, engine, param)
    elif all(isinstance(part, str) for part in given):
        prompts = await _texts([part for part in given if isinstance(part, str)], text, engine, param)
    elif all(isinstance(part, int) for part in given):
        prompts = [tuple(part for part in given if isinstance(part, int))]
    elif all(isinstance(part, list) for part in given):
        prompts = [tuple(part) for part in given if isinstance(part, list)]
    else:
        raise invalid(f"`{param}` holds texts, tokens or lists of tokens, not a mixture.", param, "invalid_type")
    for prompt in prompts:
        if not prompt:
            raise invalid(f"`{param}` is empty: there is nothing to go on with.", param)
        check_tokens(prompt, engine.vocabulary, param)
    return prompts


async def _texts(texts: Sequence[str], text: ModelText, engine: Engine, param: str) -> list[tuple[int, ...]]:
    prompts: list[tuple[int, ...]] = []
    for one in texts:
        await check_length([one], text, engine, param)
        prompts.append(await off_loop(len(one), text.text_tokens, one))
    return prompts
