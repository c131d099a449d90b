"""The HTTP surface: routes, and the gate in front of them."""

from __future__ import annotations

import hmac
import re
import uuid
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trimtab import __version__
from trimtab.serving import errors
from trimtab.serving.config import ServerConfig
from trimtab.serving.dashboard import add_dashboard
from trimtab.serving.errors import APIError
from trimtab.serving.metrics import ServerMetrics
from trimtab.serving.protocol import ChatCompletionRequest, CompletionRequest, GenerationRequest
from trimtab.serving.service import Service

REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": text}
    for status, text in {
        400: "a field is wrong, unknown or not supported; the message names it",
        401: "the API key is missing or wrong",
        404: "no such model",
        408: "the request ran longer than --request-timeout",
        413: "the body is larger than --max-body-mb",
        429: "the queue is full; see Retry-After",
        500: "generation failed",
        503: "the server is shutting down",
    }.items()
}


def create_app(service: Service, started: int) -> FastAPI:
    """The ASGI application of one engine.

    Args:
        started: Unix seconds, reported as the model's creation time.
    """
    app = FastAPI(
        title="Trimtab",
        version=__version__,
        description="OpenAI-compatible API",
        docs_url=None,  # its page loads scripts from elsewhere; the document itself is at /openapi.json
        redoc_url=None,
    )
    errors.install(app)
    _add_generation(app, service)
    _add_status(app, service, started)
    add_dashboard(app, service, started)
    app.add_middleware(Gate, config=service.config, metrics=service.metrics)
    if service.config.allowed_origins:
        from starlette.middleware.cors import CORSMiddleware

        origins = [origin.strip() for origin in service.config.allowed_origins.split(",")]
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    return app


def _add_generation(app: FastAPI, service: Service) -> None:
    async def serve(body: GenerationRequest, request: Request) -> Response:
        return await service.serve(body, request.state.request_id, request.receive)

    @app.post("/v1/completions", responses=ERRORS)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await serve(body, request)

    @app.post("/v1/chat/completions", responses=ERRORS)
    async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
        return await serve(body, request)


def _add_status(app: FastAPI, service: Service, started: int) -> None:
    card = {
        "id": service.model_name,
        "object": "model",
        "created": started,
        "owned_by": "trimtab",
        "max_model_len": service.engine.engine.max_model_len,
    }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/{name:path}", responses={404: ERRORS[404]})
    async def model(name: str) -> dict[str, Any]:
        if name != service.model_name:
            raise APIError(404, f'this server has "{service.model_name}" only', "model", "model_not_found")
        return card

    @app.get("/health", responses={503: {"description": "the engine is dead or hangs"}})
    async def health() -> Response:
        """200 while the engine steps."""
        return Response(status_code=200 if service.engine.alive and not service.engine.stalled else 503)

    @app.get("/ready", responses={503: ERRORS[503]})
    async def ready() -> Response:
        """200 while new requests are taken."""
        engine = service.engine
        return Response(status_code=200 if engine.alive and not engine.stalled and not service.draining else 503)

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.get("/metrics", responses={503: ERRORS[503]})
    async def metrics() -> Response:
        """Counters in Prometheus' text format."""
        stats = await service.stats()
        return Response(service.metrics.render(stats), media_type="text/plain; version=0.0.4; charset=utf-8")


class Gate:
    """Gives every request an id, checks its key and bounds its body. Plain ASGI, so that streams are not buffered."""

    def __init__(self, app: ASGIApp, config: ServerConfig, metrics: ServerMetrics) -> None:
        self._app, self._metrics = app, metrics
        self._expected = f"Bearer {config.api_key}".encode() if config.api_key else None
        self._max_bytes = int(config.max_body_mb * 2**20)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id

        async def tagged(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
                if message["status"] >= 400:
                    self._metrics.refused(message["status"])
            await send(message)

        refusal = self._refusal(scope, headers)
        if refusal is not None:
            await refusal.response()(scope, receive, tagged)
        else:
            await self._app(scope, self._bounded(receive), tagged)

    def _refusal(self, scope: Scope, headers: Headers) -> APIError | None:
        if self._expected is not None and scope["path"].startswith("/v1"):
            sent = headers.get("authorization", "").encode("latin-1", "replace")
            if not hmac.compare_digest(sent, self._expected):
                return APIError(401, "the API key is missing or wrong", code="invalid_api_key")
        length = headers.get("content-length", "0")
        if not length.isdigit() or int(length) > self._max_bytes:
            return APIError(413, f"the body is larger than {self._max_bytes} bytes")
        return None

    def _bounded(self, receive: Receive) -> Receive:
        """For bodies that do not say how long they are."""
        num_received = 0

        async def bounded() -> Message:
            nonlocal num_received
            message = await receive()
            num_received += len(message.get("body", b""))
            if num_received > self._max_bytes:
                raise HTTPException(413, f"the body is larger than {self._max_bytes} bytes")
            return message

        return bounded


__all__ = ["Gate", "create_app"]
