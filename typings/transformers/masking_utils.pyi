from collections.abc import Callable
from typing import Any

causal_mask_function: Callable[..., Any]
bidirectional_mask_function: Callable[..., Any]

class _Masks:
    def register(self, key: str, value: Callable[..., Any]) -> None: ...

ALL_MASK_ATTENTION_FUNCTIONS: _Masks
