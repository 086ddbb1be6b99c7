"""What stages say they got and gave, and whether a referee's word of it agrees: numbers in, an opinion out.

Keeps the marks and gradient norms of the steps that may still be checked. Decides how far two words may be apart:
machines whose fingerprints promise equal bits, not at all beyond the rounding of the marks themselves; others as far as
`backends.tolerance` lets a chain of operators be, with room. Who is at fault is `coordination.verification`'s to say.

Neighbours: `training.driver` brings what arrives; `execution.marks` makes marks.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from fusionai.backends.tolerance import TOLERANCES
from fusionai.coordination.verification import Check, Opinion
from fusionai.execution.marks import KEY_BYTES, step_key
from fusionai.wire import messages as wire
from fusionai.wire.messages import StageOptions

MarkKey = tuple[bool, bool, int, int]
"""(sent, forward, other, microbatch)."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How far results may be apart, relative to what they are held against. `marks`: of one message; `norms`: of one
    parameter's gradient, by the norm of all of the stage's; `state`: of all parameters, or of a kind of slot."""

    marks: float
    norms: float
    state: float


EXACT: Final = Limits(marks=1e-5, norms=0.0, state=0.0)
"""Where fingerprints are equal; marks are sums of another library's."""
ROOM: Final = 20.0
"""Between what honest machines may differ in one microbatch and what is held against one: a stretch of steps lets
differences grow."""
_PRECISIONS: Final = {"fp32": "float32", "bf16": "bfloat16"}


def limits(options: StageOptions, fingerprint: str, other: str) -> Limits:
    """Between machines of these fingerprints, in a job of these options."""
    if fingerprint and fingerprint == other:
        return EXACT
    stage = TOLERANCES[_PRECISIONS[options.precision]].stage
    apart = min(ROOM * stage, 0.1)
    if any(codec != "none" for codec in options.codecs):
        # A number on the border of two levels falls to either side, one in many.
        apart = max(apart, 0.05)
    return Limits(marks=apart, norms=apart, state=10 * apart)


@dataclass(slots=True)
class _Word:
    """What a stage said of one step."""

    peer: str
    key: bytes
    marks: dict[MarkKey, tuple[float, ...]]
    norms: Mapping[str, float]


@dataclass(slots=True)
class Inspection:
    """`secret`: the job's, which no peer learns; keys of stages follow from it. `owner`: who feeds."""

    secret: bytes
    owner: str
    _words: dict[tuple[int, int], _Word] = field(default_factory=dict[tuple[int, int], _Word])
    """(stage, step) -> its word."""

    def secret_of(self, stage: int, peer: str) -> bytes:
        """What `peer` makes its marks from as long as it runs `stage`."""
        return hashlib.blake2b(
            f"{stage}:{peer}".encode(), key=self.secret, digest_size=KEY_BYTES, person=b"marks of a stage"
        ).digest()

    def hear(self, peer: str, message: wire.Prepared) -> None:
        key = step_key(self.secret_of(message.stage, peer), message.step)
        self._words[message.stage, message.step] = _Word(peer, key, _by_key(message.marks), message.norms)

    def forget(self, below: int) -> None:
        """Steps below `below` will not be checked."""
        self._words = {at: word for at, word in self._words.items() if at[1] >= below}

    def keys(self, check: Check, others: Sequence[int]) -> tuple[wire.StepKey, ...]:
        """Those that a referee needs; empty where somebody's word is missing, or the stage changed hands."""
        keys: list[wire.StepKey] = []
        for step in range(check.first, check.below):
            for stage in (check.stage, *others):
                word = self._words.get((stage, step))
                if word is None or (stage == check.stage and word.peer != check.peer):
                    return ()
                keys.append(wire.StepKey(stage, step, word.key))
        return tuple(keys)

    def opinion(self, check: Check, said: wire.Rechecked, limits: Limits) -> Opinion:
        """Of what the referee says beside what the others said."""
        if said.reason:
            return Opinion(void=said.reason)
        inputs, links, own = set[str](), set[str](), list[str]()
        theirs = {(one.stage, one.step): _by_key(one.marks) for one in said.marks}
        norms = {one.step: one.norms for one in said.norms}
        for step in range(check.first, check.below):
            word = self._words.get((check.stage, step))
            again = theirs.pop((check.stage, step), None)
            if word is None or again is None or step not in norms:
                return Opinion(void=f"nothing was said of step {step}")
            for key in sorted(word.marks.keys() | again.keys()):
                off = _apart(word.marks.get(key), again.get(key))
                if off <= limits.marks:
                    continue
                sent, forward, other, microbatch = key
                if sent:
                    what = "activations" if forward else "gradients"
                    own.append(f"{what} for stage {other}, microbatch {microbatch} of step {step}, {_off(off)}")
                else:
                    inputs.add(self._peer_of(other, step))
            own += _unlike(word.norms, norms[step], limits.norms, step)
        for (stage, step), marks in theirs.items():
            word = self._words.get((stage, step))
            if word is None:
                return Opinion(void=f"stage {stage} said nothing of step {step}")
            if any(_apart(word.marks.get(key), values) > limits.marks for key, values in marks.items()):
                links.add(word.peer)
        if not said.state_apart <= limits.state:
            own.append(f"its state after step {check.below - 1} {_off(said.state_apart)}")
        if not said.begin_apart <= limits.state:
            own.append(f"the state it began from {_off(said.begin_apart)}")
        more = f" and {len(own) - 1} more" if len(own) > 1 else ""
        return Opinion(frozenset(inputs), f"{own[0]}{more}" if own else "", frozenset(links))

    def _peer_of(self, stage: int, step: int) -> str:
        word = self._words.get((stage, step))
        return self.owner if word is None else word.peer


def _by_key(marks: Sequence[wire.Mark]) -> dict[MarkKey, tuple[float, ...]]:
    return {(one.sent, one.forward, one.other, one.microbatch): one.values for one in marks}


def _unlike(said: Mapping[str, float], again: Mapping[str, float], limit: float, step: int) -> list[str]:
    """The gradient norm that differs most, in words. Each by that of all: one that is nothing but rounding tells
    nothing."""
    if said.keys() != again.keys():
        return [f"gradients of other parameters in step {step}"]
    whole = math.sqrt(sum(norm * norm for norm in again.values()))
    worst, key = max(((_difference(said[key], norm), key) for key, norm in again.items()), default=(0.0, ""))
    if worst <= limit * whole:
        return []
    return [f"the gradient of {key} in step {step} {_off(worst / whole if whole else math.inf)}"]


def _difference(one: float, two: float) -> float:
    if one == two or (math.isnan(one) and math.isnan(two)):
        return 0.0
    return abs(one - two) if math.isfinite(one - two) else math.inf


def _apart(found: Sequence[float] | None, expected: Sequence[float] | None) -> float:
    """The distance of two marks by the length of the second; infinite where one is missing."""
    if found is None or expected is None or len(found) != len(expected):
        return math.inf
    apart = math.hypot(*(_difference(one, two) for one, two in zip(found, expected, strict=True)))
    length = math.hypot(*(value for value in expected if math.isfinite(value)))
    return apart / length if length else (0.0 if apart == 0 else math.inf)


def _off(apart: float) -> str:
    return f"differ by {apart:.2g} of their size" if math.isfinite(apart) else "are not there or no numbers"
