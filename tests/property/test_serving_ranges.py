"""Positions that see each other, under arbitrary prompts, clocks and faults: never cut, and shared only if they saw the
same.

The model keeps for each place of a page the token that was written there, and for a row of an image also the whole
image, because what a stage keeps of the row depends on all of it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusionai.coordination.serving.admission import BatchLimits, TooLong
from fusionai.coordination.serving.batching import Batcher
from fusionai.coordination.serving.beginnings import Beginnings
from fusionai.coordination.serving.sessions import PassPlan, SessionSpec
from fusionai.coordination.serving.together import FEW, between, cut_before, fits, piece_end, pieces
from fusionai.execution.serving.boundary import packed
from fusionai.wire.serving import Segment
from harness.examples import examples

pytestmark = pytest.mark.slow

PAGE, PASS, TILE = 8, 128, 32
Ranges = tuple[tuple[int, int], ...]


@st.composite
def texts(draw: st.DrawFn, longest: int = PASS - 2 * FEW) -> tuple[int, Ranges]:
    """The length of a text, and its ranges, some of them beside each other."""
    found: list[tuple[int, int]] = []
    position = 0
    for gap, length in draw(st.lists(st.tuples(st.integers(0, 70), st.integers(1, longest)), max_size=5)):
        found.append((position + gap, position + gap + length))
        position += gap + length
    return position + draw(st.integers(1, 90)), tuple(found)


@given(text=texts(), wants=st.lists(st.integers(1, 100), min_size=1, max_size=8), unit=st.sampled_from((TILE, 64)))
@settings(max_examples=examples(300))
def test_pieces_leave_ranges_whole_and_are_never_few(text: tuple[int, Ranges], wants: list[int], unit: int):
    total, ranges = text
    assert fits(ranges, PASS)
    start, number = 0, 0
    while start < total:
        end = piece_end(ranges, start, min(total, start + wants[number % len(wants)]), total, unit=unit, most=PASS)
        assert start < end <= min(total, start + PASS)
        assert cut_before(ranges, end) == end, "a range is cut"
        assert start == 0 or end - start > FEW, "so few are computed in another way"
        assert end in (total, *(border for one in ranges for border in one)) or end % unit == 0
        start, number = end, number + 1


@given(text=texts(), start=st.integers(0, 60))
@settings(max_examples=examples(100))
def test_replays_leave_ranges_whole(text: tuple[int, Ranges], start: int):
    total, ranges = text
    start = cut_before(ranges, min(start, total - 1))
    inside = between(ranges, start, total)
    segment = Segment(1, start, total - start, 0, tuple(range(9)), together=inside)
    found = [one for pack in packed([segment], PASS) for one in pack]
    assert [one.start for one in found] == [start, *(one.start + one.length for one in found[:-1])]
    assert found[-1].start + found[-1].length == total
    assert [one for part in found for one in part.together] == list(inside)
    assert all(part.length <= PASS for part in found)
    assert list(pieces((), 0, 300, PASS)) == [(0, 128), (128, 256), (256, 300)]


def test_a_range_longer_than_a_pass_is_refused():
    batcher = Batcher(_limits("pages"))
    spec = SessionSpec(number=1, scope="", prompt=(0,) * 150, max_tokens=1, together=((0, PASS - 2 * FEW + 1),))
    with pytest.raises(TooLong, match="an image takes 97 positions"):
        batcher.submit(spec, 0.0)


def _limits(kind: str) -> BatchLimits:
    return BatchLimits(
        pages=160,
        page_tokens=PAGE,
        sessions=4,
        pass_tokens=PASS,
        in_flight=3,
        chunk_tokens=64,
        queue=20,
        copies=kind == "copies",
        tile_tokens=TILE,
        ahead_tokens=PASS if kind == "copies" else None,
    )


class Story:
    """Sessions with a few images in many orders, passes of which some fail, and rounds that begin anew."""

    def __init__(self, kind: str, seed: int) -> None:
        self.chance = random.Random(seed)
        self.batcher = Batcher(_limits(kind))
        self.batcher.beginnings = Beginnings(self.batcher.limits.unit, least_tokens=8)
        self.copies = kind == "copies"
        self.specs: dict[int, SessionSpec] = {}
        self.tokens: dict[int, list[int]] = {}
        self.places: dict[tuple[int, int], object] = {}
        self.tables: dict[int, list[int]] = {}
        self.kept: dict[int, list[object]] = {}
        """What a ring holds, by session or copy."""
        self.shared = 0

    def submit(self, number: int) -> None:
        prompt: list[int] = []
        for _ in range(self.chance.randint(1, 4)):
            prompt += [0] * self.chance.choice((0, 1, 9, 40))
            image = self.chance.randint(1, 3)
            prompt += range(1000 * image, 1000 * image + (8, 33, 64)[image - 1])
        prompt += [0] * self.chance.choice((1, 3, 40))
        ranges: list[tuple[int, int]] = []
        for position, token in enumerate(prompt):
            if token and ranges and ranges[-1][1] == position:
                ranges[-1] = ranges[-1][0], position + 1
            elif token:
                ranges.append((position, position + 1))
        if not fits(ranges, PASS):
            return
        spec = SessionSpec(number=number, scope="", prompt=tuple(prompt), max_tokens=3, together=tuple(ranges))
        self.batcher.submit(spec, 0.0)
        self.specs[number], self.tokens[number] = spec, list(prompt)

    def meaning(self, spec: SessionSpec, position: int) -> object:
        """What a stage's keys of a position follow from, besides the positions before it."""
        around = next((one for one in spec.together if one[0] <= position < one[1]), None)
        tokens = self.tokens[spec.number]
        return tokens[position], () if around is None else tuple(tokens[slice(*around)])

    def compute(self, plan: PassPlan) -> None:
        assert len(plan.tokens) <= PASS
        for gone in plan.forget:
            self.tables.pop(gone, None)
            self.kept.pop(gone, None)
        for segment in plan.segments:
            spec = self.specs[segment.session]
            start, end = segment.start, segment.start + segment.length
            assert cut_before(spec.together, start) == start
            assert cut_before(spec.together, end) == end
            assert segment.together == between(spec.together, start, end)
            table = self.tables.setdefault(segment.session, [])
            table[segment.first_page :] = segment.pages
            known = [self.meaning(spec, position) for position in range(start)]
            held = [self.places[table[at // PAGE], at % PAGE] for at in range(start)]
            assert held == known, "what is taken from others saw other positions"
            if self.copies and start:
                assert self.kept[segment.source or segment.session][:start] == known
            made = [self.meaning(spec, position) for position in range(start, min(end, len(self.tokens[spec.number])))]
            self.places.update(((table[(start + at) // PAGE], (start + at) % PAGE), one) for at, one in enumerate(made))
            self.kept[segment.session] = known + made
            if segment.kept_as:
                self.kept[segment.kept_as] = known + made

    def run(self) -> None:
        number = 0
        flying: list[PassPlan] = []
        for _ in range(120):
            choice = self.chance.random()
            if choice < 0.12 and number < 12:
                number += 1
                self.submit(number)
            elif choice < 0.16:
                self.batcher.rewind()
                flying.clear()
                self.rebuild()
            elif choice < 0.65 and (plan := self.batcher.next_pass(0.0)) is not None:
                self.compute(plan)
                flying.append(plan)
            elif flying:
                self.back(flying.pop(0), fails=self.chance.random() < 0.1)
        while self.tokens:
            while (plan := self.batcher.next_pass(0.0)) is not None:
                self.compute(plan)
                flying.append(plan)
            self.back(flying.pop(0), fails=False)

    def rebuild(self) -> None:
        """A stage without caches gets those of living sessions again, within passes."""
        if self.chance.random() < 0.5:
            return
        segments = self.batcher.segments_for_rebuild()
        self.batcher.caches_lost()
        for segment in segments:
            ranges = self.specs[segment.session].together
            assert segment.together == between(ranges, segment.start, segment.start + segment.length)
            self.tables[segment.session] = list(segment.pages)

    def back(self, plan: PassPlan, *, fails: bool) -> None:
        if fails:
            for one in self.batcher.failed(plan.number, 0.0):
                del self.tokens[one]
            return
        ends = set(plan.wanted_sessions) & set(self.batcher.sessions_of(plan.number))
        tokens: dict[int, Sequence[int]] = dict.fromkeys(ends, (0,))
        for one in self.batcher.returned(plan.number, tokens, (), 0.0):
            if one in ends:
                self.tokens[one].append(0)
                if len(self.tokens[one]) == len(self.specs[one].prompt) + self.specs[one].max_tokens:
                    self.shared += self.batcher.prefix_tokens > 0
                    del self.tokens[one]


@given(kind=st.sampled_from(("pages", "copies")), seed=st.integers(0, 2**32))
@settings(max_examples=examples(150))
def test_images_are_never_cut_and_shared_only_with_what_they_saw(kind: str, seed: int):
    story = Story(kind, seed)
    story.run()
    assert not story.batcher.under_way


def test_the_story_above_finds_beginnings_in_the_cache():
    assert any(_shares(kind, seed) for seed in range(20) for kind in ("pages",))
    assert any(_shares(kind, seed) for seed in range(40) for kind in ("copies",))


def _shares(kind: str, seed: int) -> bool:
    story = Story(kind, seed)
    story.run()
    return story.batcher.prefix_tokens > 0
