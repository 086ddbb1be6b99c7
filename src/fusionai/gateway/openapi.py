"""The OpenAPI 3.1 description of the HTTP interface, derived from the structs of requests and answers.

Neighbours: `requests` and `answers` have the structs; `app` serves the description at `/openapi.json`.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from fusionai.gateway.answers import ChatCompletion, Completion, EmbeddingList, ModelCard, ModelList
from fusionai.gateway.errors import ErrorAnswer
from fusionai.gateway.requests import ChatRequest, CompletionRequest, EmbeddingRequest
from fusionai.gateway.status import StatusReport

_REFERENCE: Final = "#/components/schemas/{name}"
_FORMS: Final = (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    ChatCompletion,
    Completion,
    EmbeddingList,
    ModelList,
    ModelCard,
    StatusReport,
    ErrorAnswer,
)
_ERRORS: Final = {
    "400": "The request is invalid; `param` names the field.",
    "401": "The API key is missing or invalid.",
    "403": "Without API keys, the gateway only serves this machine.",
    "404": "No such model.",
    "408": "The body arrived too slowly.",
    "413": "The body is too large.",
    "415": "The `Content-Type` is not `application/json`.",
    "429": "Too many requests; `Retry-After` says when to try again.",
    "500": "Internal error of the gateway.",
    "503": "Not ready, or the pool failed; `Retry-After` says when to try again.",
    "504": "The generation took too long.",
}
_GET_ERRORS: Final = ("401", "403", "429", "500", "503")


def description(version: str, *, has_keys: bool) -> dict[str, Any]:
    """Return the OpenAPI document."""
    _, schemas = msgspec.json.schema_components(_FORMS, ref_template=_REFERENCE)
    components: dict[str, Any] = {"schemas": schemas}
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "FusionAI",
            "version": version,
            "description": "OpenAI-compatible inference over a pool of peers.",
        },
        "paths": {
            "/v1/chat/completions": {"post": _post("chat", "Continue a conversation.", ChatRequest, ChatCompletion)},
            "/v1/completions": {"post": _post("completions", "Continue a text.", CompletionRequest, Completion)},
            "/v1/embeddings": {
                "post": _post("embeddings", "Compute vectors of texts.", EmbeddingRequest, EmbeddingList)
            },
            "/v1/models": {"get": _get("models", "Models served here.", ModelList)},
            "/v1/models/{model}": {
                "get": {
                    **_get("model", "One of the models.", ModelCard, (*_GET_ERRORS, "404")),
                    "parameters": [
                        {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
                    ],
                }
            },
            "/fusion/status": {"get": _get("status", "The pool's state.", StatusReport)},
            "/health": {"get": _plain("health", "The process is up.", {"200"})},
            "/ready": {"get": _plain("ready", "A probe has crossed all stages.", {"200", "503"})},
            "/metrics": {"get": _plain("metrics", "Metrics for Prometheus.", {"200", "401"}, "text/plain")},
        },
        "components": components,
    }
    if has_keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document


def _post(name: str, summary: str, form: type[msgspec.Struct], answer: type[msgspec.Struct]) -> dict[str, Any]:
    operation = _get(name, summary, answer, tuple(_ERRORS))
    if form is not EmbeddingRequest:
        operation["responses"]["200"]["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": _reference(form)}}}
    return operation


def _get(
    name: str, summary: str, answer: type[msgspec.Struct], errors: tuple[str, ...] = _GET_ERRORS
) -> dict[str, Any]:
    failures = {
        status: {"description": _ERRORS[status], "content": {"application/json": {"schema": _reference(ErrorAnswer)}}}
        for status in errors
    }
    success = {"description": summary, "content": {"application/json": {"schema": _reference(answer)}}}
    return {"operationId": name, "summary": summary, "responses": {"200": success, **failures}}


def _plain(name: str, summary: str, statuses: set[str], media: str = "application/json") -> dict[str, Any]:
    answers = {
        status: {"description": _ERRORS.get(status, summary), "content": {media: {}}} for status in sorted(statuses)
    }
    for status in ("401", "403"):
        answers[status] = {"description": _ERRORS[status], "content": {"application/json": {}}}
    answers["503"] = {"description": _ERRORS["503"], "content": {"application/json": {}}}
    return {"operationId": name, "summary": summary, "responses": answers}


def _reference(form: type[msgspec.Struct]) -> dict[str, str]:
    return {"$ref": _REFERENCE.format(name=form.__name__)}
