"""Errors in the shape of the OpenAI API: fields and limits, never paths, stack traces or other people's text."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

logger = logging.getLogger("trimtab.serving")

KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}


class APIError(Exception):
    """An answer other than 200.

    Attributes:
        param: field of the request that is at fault.
        retry_after: seconds after which trying again makes sense.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.retry_after = status, message, param, code, retry_after

    def body(self) -> dict[str, Any]:
        kind = KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        message = self.message.encode(
            "utf-8", "replace"
        ).decode()  # a lone surrogate that was sent can not be sent back
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        return JSONResponse(self.body(), self.status, headers)


def suggestion(word: str, known: Iterable[str]) -> str:
    """'; did you mean "x"?' if something close is known, else nothing."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f'; did you mean "{close[0]}"?' if close else ""


def from_validation(errors: Iterable[Any]) -> APIError:
    """The first of pydantic's complaints in one sentence; the value that was sent is not repeated."""
    first = next(iter(errors))
    location = [str(part) for part in first["loc"] if part != "body"]
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "refused_field":
        return APIError(400, message, first["ctx"]["param"])
    if first["type"] == "json_invalid":
        return APIError(400, f"the body is not valid JSON: {first.get('ctx', {}).get('error', message)}")
    if first["type"] == "missing" and not location:
        return APIError(400, "the body is empty; send a JSON object")
    if not location:
        if first["type"].endswith(("_type", "_attributes_type")):
            message = "the body must be a JSON object, sent with Content-Type: application/json"
        return APIError(400, message)
    return APIError(400, f"{'.'.join(location)}: {message}", location[0])


def install(app: FastAPI) -> None:
    """Answer every failure of a route in OpenAI's shape."""

    @app.exception_handler(APIError)
    async def _ours(_request: Request, error: APIError) -> JSONResponse:
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def _invalid(_request: Request, error: RequestValidationError) -> JSONResponse:
        return from_validation(error.errors()).response()

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> JSONResponse:
        if error.status_code == 404:
            return APIError(404, f"no such endpoint: {request.method} {request.url.path}").response()
        return APIError(error.status_code, str(error.detail)).response()

    @app.exception_handler(Exception)
    async def _unexpected(_request: Request, error: Exception) -> JSONResponse:
        logger.error("a request failed unexpectedly", exc_info=error)
        return APIError(500, "internal error; the server's log has the details").response()
