"""Images in prompts: tokens for rows, what the first stage gets, what is kept."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from fusionai.capture.models.images import EncodedImage
from fusionai.ir.schema import Graph, ValueSpec
from fusionai.ir.serving import AXIS_POSITIONS, IMAGE_ROWS, LAYER_ROWS
from fusionai.primitives.errors import ExecutionError, UsageError
from fusionai.serving import images
from fusionai.serving.images import (
    FIRST_TOKEN,
    ImageFeed,
    ImageMarks,
    ImageReader,
    PlacedImage,
    is_image,
    seen_together,
    with_rows,
    with_texts,
)
from fusionai.serving.interface import Sampling
from fusionai.serving.sampling import TokenHistory
from fusionai.serving.speculating import NgramProposer
from fusionai.wire.messages import Segment

MARKS = ImageMarks("<image>", 7)
WIDTH = 4


def encoded(rows: int, *, value: float = 1.0, grid: tuple[int, int] | None = None, layers: int = 0) -> EncodedImage:
    axes = None
    if grid is not None:
        axes = np.array([(0, row, column) for row in range(grid[0]) for column in range(grid[1])], np.int64)
    return EncodedImage(
        text="<image>" * rows,
        rows=np.full((rows, WIDTH), value, np.float32) + np.arange(rows, dtype=np.float32)[:, None],
        axes=axes,
        advance=rows if grid is None else max(grid),
        layer_rows=np.full((rows, layers * WIDTH), 10 * value, np.float32) if layers else None,
    )


def placed(first: int, image: EncodedImage) -> PlacedImage:
    return PlacedImage(FIRST_TOKEN + first, image, MARKS)


def graph(*inputs: str) -> Graph:
    values = {
        IMAGE_ROWS: ValueSpec(("b", "s", WIDTH), "float32"),
        LAYER_ROWS: ValueSpec(("b", "s", 2 * WIDTH), "float32"),
        AXIS_POSITIONS: ValueSpec(("b", "s", 3), "int64"),
        "input_ids": ValueSpec(("b", "s"), "int64"),
    }
    names = ("input_ids", *inputs)
    return Graph(
        name="g", symbols={"b": (1, 2), "s": (1, 64)}, inputs=names, outputs={}, params={}, nodes=(),
        values={name: values[name] for name in names},
    )  # fmt: skip


def segment(session: int, start: int, length: int) -> Segment:
    return Segment(session, start, length, 0, ())


def arrays(feed: ImageFeed, segments: list[Segment], tokens: list[int]) -> dict[str, np.ndarray]:
    made = feed.tensors(segments, tokens)
    return {name: np.frombuffer(tensor.data, tensor.dtype).reshape(tensor.shape)[0] for name, tensor in made.items()}


def test_a_model_without_images_gets_tokens_alone():
    made = arrays(ImageFeed(graph()), [segment(1, 0, 3)], [3, 4, 5])
    assert list(made) == ["input_ids"]
    assert made["input_ids"].tolist() == [3, 4, 5]


def test_rows_lie_where_their_tokens_are_also_in_pieces_of_several_sessions():
    feed = ImageFeed(graph(IMAGE_ROWS, LAYER_ROWS))
    one, other = placed(0, encoded(3, value=1.0, layers=2)), placed(3, encoded(2, value=50.0, layers=2))
    prompt = [9, *one.tokens, 8, *other.tokens, 8]
    feed.begin(5, prompt, [other, one])
    made = arrays(feed, [segment(4, 0, 2), segment(5, 2, 5)], [1, 2, *prompt[2:7]])
    assert made["input_ids"].tolist() == [1, 2, -1, -1, 8, -1, -1]
    assert made[IMAGE_ROWS][:, 0].tolist() == [0, 0, 2, 3, 0, 50, 51]
    assert made[LAYER_ROWS].shape == (7, 2 * WIDTH)
    assert made[LAYER_ROWS][:, 0].tolist() == [0, 0, 10, 10, 0, 500, 500]


def test_positions_on_three_axes_count_on_from_the_end_of_an_image():
    """Qwen2-VL's rule (arXiv 2409.12191): an image of 2 x 3 takes positions from its first one, text goes on after the
    larger of its sides; answers after the prompt keep the difference."""
    feed = ImageFeed(graph(IMAGE_ROWS, AXIS_POSITIONS))
    image = placed(0, encoded(6, grid=(2, 3)))
    prompt = [9, 9, *image.tokens, 9, 9]
    feed.begin(1, prompt, [image])
    made = arrays(feed, [segment(1, 1, 9), segment(2, 5, 1)], [*prompt[1:], 4])
    assert made[AXIS_POSITIONS].tolist() == [
        [1, 1, 1], [2, 2, 2], [2, 2, 3], [2, 2, 4], [2, 3, 2], [2, 3, 3], [2, 3, 4], [5, 5, 5], [6, 6, 6], [5, 5, 5],
    ]  # fmt: skip
    after = arrays(feed, [segment(1, 10, 2)], [1, 2])
    assert after[AXIS_POSITIONS].tolist() == [[7, 7, 7], [8, 8, 8]]


def test_rows_of_a_session_that_is_over_are_refused():
    feed = ImageFeed(graph(IMAGE_ROWS))
    image = placed(0, encoded(2))
    feed.begin(1, list(image.tokens), [image])
    feed.end(1)
    with pytest.raises(ExecutionError, match="the images of session 1 are no longer here"):
        feed.tensors([segment(1, 0, 2)], list(image.tokens))


def test_placeholders_become_texts_in_trusted_pieces_only():
    one, other = placed(0, encoded(1)), placed(1, encoded(2))
    pieces = [("a<image>b", True), ("<image>", False), ("<image>", True)]
    assert with_texts(pieces, [one, other]) == [("a<image>b", True), ("<image>", False), ("<image><image>", True)]
    assert with_texts(pieces, []) == pieces
    with pytest.raises(UsageError, match="has 1 images, and the model's chat template makes 2 places"):
        with_texts(pieces, [one])


def test_rows_take_the_places_of_the_models_image_token():
    one, other = placed(0, encoded(2)), placed(2, encoded(1))
    assert with_rows([7, 3, 7, 7], [one, other]) == (FIRST_TOKEN, 3, FIRST_TOKEN + 1, FIRST_TOKEN + 2)
    assert with_rows([7, 3], []) == (7, 3)
    with pytest.raises(UsageError, match="has 2 places for rows of images, which have 3"):
        with_rows([7, 7], [one, other])


def reader(calls: list[bytes]) -> ImageReader:
    def encode(data: bytes) -> EncodedImage:
        calls.append(data)
        if data == b"bad":
            raise UsageError("these bytes are no picture in a known format.")
        return encoded(len(data))

    return ImageReader(encode, MARKS)


def test_a_picture_is_encoded_once_per_scope():
    calls: list[bytes] = []
    made = reader(calls)

    async def story() -> None:
        first = await made.read(b"aaaa", "one")
        assert await made.read(b"aaaa", "one") is first
        other = await made.read(b"aaaa", "two")
        assert other.first == first.first + 4
        assert is_image(first.first)
        both = await asyncio.gather(made.read(b"bb", "one"), made.read(b"bb", "one"))
        assert both[0] is both[1]
        with pytest.raises(UsageError, match="no picture"):
            await made.read(b"bad", "one")

    asyncio.run(story())
    made.close()
    assert calls[:2] == [b"aaaa", b"aaaa"]


def test_the_oldest_rows_go_when_the_kept_ones_grow_too_large(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(images, "KEPT_BYTES", 5 * WIDTH * 4)
    calls: list[bytes] = []
    made = reader(calls)

    async def story() -> None:
        for data in (b"aa", b"bbb", b"c", b"bbb", b"aa"):
            await made.read(data, "")

    asyncio.run(story())
    made.close()
    assert calls == [b"aa", b"bbb", b"c", b"aa"]


def test_too_many_waiting_pictures_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(images, "WAITING", 1)
    made = reader([])

    async def story() -> None:
        first = asyncio.create_task(made.read(b"a", ""))
        await asyncio.sleep(0)
        with pytest.raises(UsageError, match="1 images wait"):
            await made.read(b"b", "")
        await first

    asyncio.run(story())
    made.close()


def test_penalties_and_guesses_leave_rows_of_images_out():
    prompt = [5, FIRST_TOKEN, FIRST_TOKEN + 1, 5, 6, 5, 6]
    assert TokenHistory(prompt).seen.tolist() == [5, 6]
    guessing = NgramProposer()
    guessing.begin(1, [1, 2, 3, FIRST_TOKEN, 4, 1, 2], Sampling())
    assert guessing.propose({1: 4}) == {1: (3,)}


def test_rows_without_text_between_them_see_each_other_if_the_model_says_so():
    marks = ImageMarks("<image>", 7, together=True)
    one, two = (PlacedImage(FIRST_TOKEN + first, encoded(3), marks) for first in (0, 3))
    prompt = with_rows((7, 7, 7, 5, 7, 7, 7), (one, two))
    assert seen_together(prompt, (one, two)) == ((0, 3), (4, 7))
    assert seen_together((5, *one.tokens, *two.tokens, 5), (one, two)) == ((1, 7),)
    assert seen_together((5, 5), (one,)) == ()
    assert seen_together(prompt, (placed(0, encoded(3)), placed(3, encoded(3)))) == ()
