"""Forms in `multipart/form-data`: as clients write them, and broken ones."""

from __future__ import annotations

import httpx
import pytest

from fusionai.gateway.errors import ApiError
from fusionai.gateway.forms import MOST_PARTS, is_form, parts_of


def written(**fields: str) -> tuple[bytes, str]:
    request = httpx.Request("POST", "http://x", data=fields, files={"file": ("ä.wav", b"RIFF\r\n--\x00")})
    return request.read(), request.headers["content-type"]


def test_fields_and_files_as_a_client_writes_them() -> None:
    body, kind = written(model="tiny", language="de")
    assert is_form(kind)
    assert [(part.name, part.filename is not None, part.data) for part in parts_of(body, kind)] == [
        ("model", False, b"tiny"),
        ("language", False, b"de"),
        ("file", True, b"RIFF\r\n--\x00"),
    ]


@pytest.mark.parametrize("cut", [0, 10, 60, -4])
def test_a_form_without_its_end_is_refused(cut: int) -> None:
    body, kind = written(model="tiny")
    with pytest.raises(ApiError, match="no valid form"):
        parts_of(body[:cut], kind)


def test_other_bodies_are_refused() -> None:
    for kind in ("application/json", "multipart/form-data", "", "multipart/form-data; boundary="):
        with pytest.raises(ApiError, match="boundary"):
            parts_of(b"{}", kind)
    body, kind = written(**{f"field{number}": "x" for number in range(MOST_PARTS)})
    with pytest.raises(ApiError, match="more than"):
        parts_of(body, kind)
    body, kind = written(model="tiny")
    with pytest.raises(ApiError, match="no name"):
        parts_of(body.replace(b'name="model"', b'xame="model"'), kind)
