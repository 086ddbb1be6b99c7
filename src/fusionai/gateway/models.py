"""Lists the model and its adapters, and loads and unloads adapters as vLLM's server does.

`serving.interface.AdapterLoader` loads them; `context` knows which names requests may use.
"""

from __future__ import annotations

from typing import Literal

from starlette.requests import Request
from starlette.responses import Response

from fusionai.gateway.answers import ModelCard, ModelList
from fusionai.gateway.context import GatewayContext, json_response
from fusionai.gateway.errors import ApiError, as_api_error, invalid
from fusionai.gateway.requests import LoadAdapterRequest, UnloadAdapterRequest
from fusionai.primitives.errors import StorageError
from fusionai.serving.interface import AdapterLoader


class ModelEndpoint:
    """Lists the model and its adapters."""

    def __init__(self, context: GatewayContext) -> None:
        self._context = context

    async def models(self, request: Request) -> Response:
        """Every name that a request may give as its model."""
        del request
        config = self._context.config
        names = (config.model, *config.aliases, *self._context.adapters)
        return json_response(ModelList([self._card(name) for name in names]))

    async def model(self, request: Request) -> Response:
        """One of the models."""
        name = request.path_params["model"]
        self._context.adapter_of(name)
        return json_response(self._card(name))

    async def load_adapter(self, request: Request) -> Response:
        """Load an adapter, after which requests may name it as their model."""
        loader, config = self._loader(), self._context.config
        body = await self._context.read(request, LoadAdapterRequest, gift=None)
        if body.lora_name in (config.model, *config.aliases):
            raise invalid(f"The name `{body.lora_name}` is the model's own.", "lora_name")
        with as_api_error():
            try:
                await loader.load(body.lora_name, body.lora_path)
            except StorageError as problem:
                raise invalid(str(problem), "lora_path") from problem
        return _said(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload_adapter(self, request: Request) -> Response:
        """Unload an adapter. Answers that use it are finished."""
        loader = self._loader()
        body = await self._context.read(request, UnloadAdapterRequest, gift=None)
        if self._context.adapter_of(body.lora_name) is None:
            raise invalid(f"`{body.lora_name}` is the model itself, not an adapter.", "lora_name")
        await loader.unload(body.lora_name)
        return _said(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    def _loader(self) -> AdapterLoader:
        if (loader := self._context.loader) is None:
            message = "Adapters can't be loaded here: the server was started without --adapter-directory."
            raise ApiError(403, message, code="adapters_fixed")
        return loader

    def _card(self, name: str) -> ModelCard:
        config = self._context.config
        parent = config.model if name in self._context.adapters else None
        engine, text = self._context.engine, self._context.text
        reads: tuple[Literal["text", "image", "audio"], ...] = ("text",)
        if text.images is not None:
            reads = ("text", "image")
        elif text.source is not None and text.source.speech is not None:
            reads = ("audio",)
        return ModelCard(name, config.created_s, engine.context_tokens, engine.purpose, reads, parent=parent)


def _said(text: str) -> Response:
    return Response(text, media_type="text/plain; charset=utf-8")
