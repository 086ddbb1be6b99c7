"""Privacy levels of a job: names, order, and what stays with the job owner at each.

Recipes and commands name a level, `scheduling` places blocks by it, `docs/threat_model.md` says what each protects
against.
"""

from __future__ import annotations

from typing import Final, Literal, get_args

PrivacyLevel = Literal["open", "encrypted", "split", "split-k", "trusted"]

LEVELS: Final[tuple[PrivacyLevel, ...]] = get_args(PrivacyLevel)
"""All levels in order: each requires more of a job than those before it."""

STAYS: Final[dict[PrivacyLevel, str]] = {
    "open": (
        "Nothing has to stay with the job owner: any peer may hold any block, and the peer with the embedding reads "
        "token ids."
    ),
    "encrypted": (
        "As open for the peers that compute; all others that carry or store data of the job see only ciphertext."
    ),
    "split": (
        "Tokenizer, embedding, final norm, head, loss, labels and sampling stay with the job owner. No token id, label "
        "or logit leaves it; activations and gradients of the layers between do."
    ),
    "split-k": "As split, and the first k and the last m layers stay with the job owner too.",
    "trusted": ("Only peers whose keys are signed by a key that the job owner trusts may hold blocks."),
}
"""Level -> a sentence about what stays with the job owner."""


def keeps_ends(level: PrivacyLevel) -> bool:
    """Return whether embedding and head stay with the job owner."""
    return level in ("split", "split-k")
