"""Privacy levels of a job: their names, their order, what stays with the job owner at each. Decides no placement.

Neighbours: recipes and commands name a level, `scheduling` places blocks by it, `docs/threat_model.md` says what each
holds against.
"""

from __future__ import annotations

from typing import Final, Literal, get_args

PrivacyLevel = Literal["open", "encrypted", "split", "split-k", "trusted"]

LEVELS: Final[tuple[PrivacyLevel, ...]] = get_args(PrivacyLevel)
"""In order: each asks more of a job than those before it."""

STAYS: Final[dict[PrivacyLevel, str]] = {
    "open": (
        "Nothing need stay with the job owner: any block may lie with any peer, and the embedding's peer reads token "
        "ids."
    ),
    "encrypted": (
        "As open for the peers that compute; whoever else carries or keeps something of the job has ciphertext only."
    ),
    "split": (
        "Tokenizer, embedding, final norm, head, loss, labels and sampling stay with the job owner; no token id, label "
        "or logit leaves, activations and gradients of the layers between do."
    ),
    "split-k": "As split, and the first k and the last m layers stay with the job owner, too.",
    "trusted": (
        "Blocks may lie with any peer whose key is signed by a key that the job owner trusts, and with nobody else."
    ),
}
"""Level -> a sentence about what stays."""


def keeps_ends(level: PrivacyLevel) -> bool:
    """Whether embedding and head stay with the job owner."""
    return level in ("split", "split-k")
