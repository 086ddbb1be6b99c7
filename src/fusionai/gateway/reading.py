"""Decodes a request's body. Refuses what is too large or invalid before it costs work, and names the wrong field.

Neighbours: `requests` has the structs, endpoints call `read`.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any, Final, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from fusionai.gateway.config import Limits
from fusionai.gateway.errors import ApiError, invalid, nearest
from fusionai.gateway.requests import ADVICE, HARMLESS, NEUTRAL

Form = TypeVar("Form", bound=msgspec.Struct)
_WHERE: Final = re.compile(r"^(?P<what>.*?)(?: - at `\$\.?(?P<path>.*)`)?$", re.DOTALL)
_UNKNOWN: Final = re.compile(r"Object contains unknown field `(?P<name>.*)`", re.DOTALL)
_HEARD_OUT: Final = 4
"""A body up to this many times the limit is read to its end, without keeping it, before it is refused."""
_MISSING: Final = re.compile(r"Object missing required field `(?P<name>.*)`")


async def read(request: Request, form: type[Form], limits: Limits) -> Form:
    """Decode the request's body as `form`. Raises `ApiError`."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, "Expected the header `Content-Type: application/json`.", code="unsupported_media_type")
    return decode(await _body(request, limits), form)


def decode(body: bytes, form: type[Form]) -> Form:
    """Decode a body as `form`. Raises `ApiError` with the wrong field."""
    known = [field.encode_name for field in msgspec.structs.fields(form)]
    try:
        given = msgspec.json.decode(body)
        if isinstance(given, dict):
            given = _wanted(given, known)
        return msgspec.convert(given, form)
    except msgspec.ValidationError as problem:
        raise _explained(str(problem), known) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as problem:
        raise invalid(f"The body is not valid JSON: {problem}", code="invalid_json") from None
    except RecursionError:
        raise invalid("The body is nested too deeply.", code="invalid_json") from None


async def _body(request: Request, limits: Limits) -> bytes:
    told = request.headers.get("content-length", "")
    if told.isdecimal() and (len(told) > 18 or int(told) > _HEARD_OUT * limits.body_bytes):
        raise _too_large(limits)
    body = bytearray()
    size = 0
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            async for piece in request.stream():
                size += len(piece)
                if size <= limits.body_bytes:
                    body += piece
                # Most clients read no answer before they have sent the whole body, so the rest is read and dropped.
                elif size > _HEARD_OUT * limits.body_bytes:
                    raise _too_large(limits)
                else:
                    body.clear()
    except TimeoutError:
        raise ApiError(
            408,
            f"The body did not arrive within {limits.body_timeout_s:g} s.",
            code="request_timeout",
            headers={"Connection": "close"},
        ) from None
    except ClientDisconnect:
        raise ApiError(400, "The connection closed before the body was complete.", code="incomplete_body") from None
    if size > limits.body_bytes:
        raise _too_large(limits)
    return bytes(body)


def _too_large(limits: Limits) -> ApiError:
    message = f"The body is larger than {limits.body_bytes} bytes."
    return ApiError(413, message, code="request_too_large", headers={"Connection": "close"})


def _wanted(given: dict[str, Any], known: list[str]) -> dict[str, Any]:
    """Remove fields that ask for nothing. Raises `ApiError` for a field that asks for something unsupported."""
    wanted = dict(given)
    for name in given:
        if name in known:
            continue
        if name in HARMLESS:
            del wanted[name]
        elif name in NEUTRAL:
            if given[name] not in NEUTRAL[name]:
                advice = f" {ADVICE[name]}" if name in ADVICE else ""
                raise invalid(f"`{name}` is not supported by this gateway.{advice}", name, "unsupported_parameter")
            del wanted[name]
    return wanted


def _explained(said: str, known: list[str]) -> ApiError:
    found = _WHERE.match(said)
    what, path = (found["what"], found["path"] or "") if found else (said, "")
    unknown, missing = _UNKNOWN.match(what), _MISSING.match(what)
    if unknown is not None:
        name = f"{path}.{unknown['name']}" if path else unknown["name"]
        near = nearest(unknown["name"], known) if not path else ""
        return invalid(f"Unknown parameter: `{name}`.{near}", name, "unknown_parameter")
    if missing is not None:
        name = f"{path}.{missing['name']}" if path else missing["name"]
        return invalid(f"Missing required parameter: `{name}`.", name, "missing_required_parameter")
    where = f"`{path}`: " if path else ""
    return invalid(f"{where}{what}.", path or None, "invalid_type" if what.startswith("Expected") else "invalid_value")
