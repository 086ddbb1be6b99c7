"""Compares what stages reported of their work with what a verifier got when it reran it, and forms an opinion.

It keeps sketches and gradient norms of all steps that may still be checked, and defines how far two results may differ:
machines with equal fingerprints only by the rounding of the sketches themselves, others as far as `backends.tolerance`
allows for a chain of operators, with a margin. `coordination.round.verification` decides which peer is at fault.

`training.driver` brings what arrives; `execution.tensors` makes the sketches.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from fusionai.backends.tolerance import TOLERANCES
from fusionai.coordination.round.verification import Check, Opinion
from fusionai.execution.tensors import KEY_BYTES, step_key
from fusionai.wire import messages as wire
from fusionai.wire.messages import StageOptions

SketchKey = tuple[bool, bool, int, int]
"""(sent, forward, other stage, microbatch)."""


@dataclass(frozen=True, slots=True)
class WorkTolerance:
    """Largest accepted relative differences. `sketches`: of one message. `norms`: of one parameter's gradient, relative
    to the norm of all gradients of the stage. `state`: of all parameters together, or of all slots of one kind."""

    sketches: float
    norms: float
    state: float


EXACT: Final = WorkTolerance(sketches=1e-5, norms=0.0, state=0.0)
"""Limits for equal fingerprints. Sketches may still be summed by different libraries."""
ROOM: Final = 20.0
"""Factor from the tolerance of one microbatch to the accepted difference, because differences grow over several steps
(chosen)."""
_PRECISIONS: Final = {"fp32": "float32", "bf16": "bfloat16"}
"""Precision of a job -> dtype name in the table of tolerances."""


def limits(options: StageOptions, fingerprint: str, other: str) -> WorkTolerance:
    """Return the limits between two machines with these fingerprints, in a job with these options."""
    if fingerprint and fingerprint == other:
        return EXACT
    stage = TOLERANCES[_PRECISIONS[options.precision]].stage
    apart = min(ROOM * stage, 0.1)
    if any(codec != "none" for codec in options.codecs):
        # A number between two quantisation levels can round to either one; that happens to a small share of numbers.
        apart = max(apart, 0.05)
    return WorkTolerance(sketches=apart, norms=apart, state=10 * apart)


@dataclass(slots=True)
class _Word:
    """What a stage reported of one step."""

    peer: str
    key: bytes
    sketches: dict[SketchKey, tuple[float, ...]]
    norms: Mapping[str, float]


@dataclass(slots=True)
class Inspection:
    """Reports of the stages, and the keys of their sketches. `secret`: the job's secret, which peers do not know; the
    stages' keys are derived from it. `owner`: peer id of the feed."""

    secret: bytes
    owner: str
    _words: dict[tuple[int, int], _Word] = field(default_factory=dict[tuple[int, int], _Word])
    """(stage, step) -> its report."""
    _prints: dict[str, str] = field(default_factory=dict[str, str])
    """Peer -> the fingerprint that it reported; empty if one of its stages promises no bits."""

    def enlisted(self, peer: str, fingerprint: str) -> None:
        """Note a peer's fingerprint at the beginning of a round."""
        self._prints[peer] = fingerprint

    def attached(self, peer: str, fingerprint: str) -> None:
        """Note the fingerprint under which a stage of the peer runs."""
        if self._prints.get(peer, fingerprint):
            self._prints[peer] = fingerprint

    def limits(self, options: StageOptions, check: Check) -> WorkTolerance:
        """Return the limits between the peer that is checked and the verifier."""
        return limits(options, self._prints.get(check.peer, ""), self._prints.get(check.verifier, ""))

    def secret_of(self, stage: int, peer: str) -> bytes:
        """Return the secret from which `peer` derives its sketch keys while it runs `stage`."""
        return hashlib.blake2b(
            f"{stage}:{peer}".encode(), key=self.secret, digest_size=KEY_BYTES, person=b"marks of a stage"
        ).digest()

    def hear(self, peer: str, message: wire.Prepared) -> None:
        key = step_key(self.secret_of(message.stage, peer), message.step)
        self._words[message.stage, message.step] = _Word(peer, key, _by_key(message.sketches), message.norms)

    def forget(self, below: int) -> None:
        """Drop reports of steps below `below`, which will not be checked."""
        self._words = {at: word for at, word in self._words.items() if at[1] >= below}

    def keys(self, check: Check, others: Sequence[int]) -> tuple[wire.StepKey, ...]:
        """Return the keys that a verifier needs; empty if a report is missing or the stage changed its peer."""
        keys: list[wire.StepKey] = []
        for step in range(check.first, check.below):
            for stage in (check.stage, *others):
                word = self._words.get((stage, step))
                if word is None or (stage == check.stage and word.peer != check.peer):
                    return ()
                keys.append(wire.StepKey(stage, step, word.key))
        return tuple(keys)

    def opinion(self, check: Check, reported: wire.Rechecked, limits: WorkTolerance) -> Opinion:
        """Compare the verifier's results with the reports of the stage and its neighbours."""
        if reported.reason:
            return Opinion(void=reported.reason)
        inputs, links, own = set[str](), set[str](), list[str]()
        theirs = {(one.stage, one.step): _by_key(one.sketches) for one in reported.sketches}
        norms = {one.step: one.norms for one in reported.norms}
        for step in range(check.first, check.below):
            word = self._words.get((check.stage, step))
            again = theirs.pop((check.stage, step), None)
            if word is None or again is None or step not in norms:
                return Opinion(void=f"there is no report of step {step}")
            for key in sorted(word.sketches.keys() | again.keys()):
                off = _apart(word.sketches.get(key), again.get(key))
                if off <= limits.sketches:
                    continue
                sent, forward, other, microbatch = key
                if sent:
                    what = "activations" if forward else "gradients"
                    own.append(f"{what} for stage {other}, microbatch {microbatch} of step {step}, {_off(off)}")
                else:
                    inputs.add(self._peer_of(other, step))
            own += _unlike(word.norms, norms[step], limits.norms, step)
        for (stage, step), sketches in theirs.items():
            word = self._words.get((stage, step))
            if word is None:
                return Opinion(void=f"stage {stage} has no report of step {step}")
            if any(_apart(word.sketches.get(key), values) > limits.sketches for key, values in sketches.items()):
                links.add(word.peer)
        if not reported.state_distance <= limits.state:
            own.append(f"its state after step {check.below - 1} {_off(reported.state_distance)}")
        if not reported.begin_distance <= limits.state:
            own.append(f"the state it began from {_off(reported.begin_distance)}")
        more = f" and {len(own) - 1} more" if len(own) > 1 else ""
        return Opinion(frozenset(inputs), f"{own[0]}{more}" if own else "", frozenset(links))

    def _peer_of(self, stage: int, step: int) -> str:
        word = self._words.get((stage, step))
        return self.owner if word is None else word.peer


def _by_key(sketches: Sequence[wire.Sketch]) -> dict[SketchKey, tuple[float, ...]]:
    return {(one.sent, one.forward, one.other, one.microbatch): one.values for one in sketches}


def _unlike(reported: Mapping[str, float], again: Mapping[str, float], limit: float, step: int) -> list[str]:
    """Describe the gradient norm that differs most; empty if all agree. Differences are relative to the norm of all
    gradients, because a single gradient may consist of rounding errors only."""
    if reported.keys() != again.keys():
        return [f"gradients of other parameters in step {step}"]
    whole = math.sqrt(sum(norm * norm for norm in again.values()))
    worst, key = max(((_difference(reported[key], norm), key) for key, norm in again.items()), default=(0.0, ""))
    if worst <= limit * whole:
        return []
    return [f"the gradient of {key} in step {step} {_off(worst / whole if whole else math.inf)}"]


def _difference(one: float, two: float) -> float:
    if one == two or (math.isnan(one) and math.isnan(two)):
        return 0.0
    return abs(one - two) if math.isfinite(one - two) else math.inf


def _apart(found: Sequence[float] | None, expected: Sequence[float] | None) -> float:
    """Return the distance of two sketches divided by the length of the second; infinite if one is missing."""
    if found is None or expected is None or len(found) != len(expected):
        return math.inf
    apart = math.hypot(*(_difference(one, two) for one, two in zip(found, expected, strict=True)))
    length = math.hypot(*(value for value in expected if math.isfinite(value)))
    return apart / length if length else (0.0 if apart == 0 else math.inf)


def _off(apart: float) -> str:
    return f"differ by {apart:.2g} of their size" if math.isfinite(apart) else "are missing or not finite"
