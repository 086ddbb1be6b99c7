"""Bodies in `multipart/form-data` (RFC 7578): their fields and files, in memory.

Reads nothing from the network and writes no files; `requests` limits a body's size first. `audio` and `front` use
it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from fusionai.gateway.errors import ApiError, invalid

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

MULTIPART: Final = "multipart/form-data"
MOST_PARTS: Final = 64
"""Parts of a form (chosen)."""


@dataclass(frozen=True, slots=True)
class FormPart:
    """A field, or a file if it has a `filename`."""

    name: str
    filename: str | None
    data: bytes

    @property
    def text(self) -> str:
        """The field's value. Raises `ApiError` if it is no text."""
        try:
            return self.data.decode()
        except UnicodeDecodeError:
            raise invalid(f"`{self.name[:64]}` is not valid UTF-8.", self.name[:64]) from None


def is_form(content_type: str) -> bool:
    """Return whether a body with this `Content-Type` is a form."""
    return content_type.partition(";")[0].strip().lower() == MULTIPART


def parts_of(body: bytes, content_type: str) -> list[FormPart]:
    """Return the parts of a form, in order. Raises `ApiError` for a body that is none."""
    boundary = parse_options_header(content_type)[1].get(b"boundary", b"")
    if not is_form(content_type) or not boundary:
        raise ApiError(415, f"Expected `Content-Type: {MULTIPART}` with a boundary.", code="unsupported_media_type")
    reader = _Reader()
    try:
        parser = MultipartParser(boundary, reader.callbacks)
        parser.write(body)
        parser.finalize()
    except FormParserError as problem:
        raise invalid(f"The body is no valid form: {problem}", code="invalid_form") from None
    if not reader.has_ended:
        raise invalid("The body is no valid form: its end is missing.", code="invalid_form")
    return reader.parts


@dataclass(slots=True)
class _Reader:
    parts: list[FormPart] = field(default_factory=list[FormPart])
    has_ended: bool = False
    _header: bytearray = field(default_factory=bytearray)
    _value: bytearray = field(default_factory=bytearray)
    _disposition: bytes = b""
    _data: bytearray = field(default_factory=bytearray)

    @property
    def callbacks(self) -> MultipartCallbacks:
        """What the parser calls."""
        return {
            "on_part_begin": self._begin,
            "on_header_field": lambda data, start, end: self._header.extend(data[start:end]),
            "on_header_value": lambda data, start, end: self._value.extend(data[start:end]),
            "on_header_end": self._end_header,
            "on_part_data": lambda data, start, end: self._data.extend(data[start:end]),
            "on_part_end": self._end,
            "on_end": self._finish,
        }

    def _begin(self) -> None:
        if len(self.parts) == MOST_PARTS:
            raise invalid(f"The form has more than {MOST_PARTS} parts.", code="invalid_form")
        self._disposition, self._data = b"", bytearray()

    def _end_header(self) -> None:
        if bytes(self._header).lower() == b"content-disposition":
            self._disposition = bytes(self._value)
        self._header, self._value = bytearray(), bytearray()

    def _end(self) -> None:
        _, options = parse_options_header(self._disposition)
        name = options.get(b"name")
        if name is None:
            raise invalid("A part of the form has no name.", code="invalid_form")
        filename = options.get(b"filename")
        shown = None if filename is None else filename.decode(errors="replace")
        self.parts.append(FormPart(name.decode(errors="replace"), shown, bytes(self._data)))

    def _finish(self) -> None:
        self.has_ended = True
