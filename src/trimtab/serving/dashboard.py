"""The live page ``/dashboard`` and the numbers that it polls."""

from __future__ import annotations

import dataclasses
import math
import time
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.responses import HTMLResponse, JSONResponse

from trimtab import __version__
from trimtab.serving.service import Service

PAGE = Path(__file__).with_name("dashboard.html")
# Nothing is loaded from elsewhere, and nothing could be.
CONTENT_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
)


def add_dashboard(app: FastAPI, service: Service, started: int) -> None:
    """Add the page and its endpoint. Both are open as ``/metrics`` is: they hold counts, never text of a request.

    Args:
        started: Unix seconds; tells a page that the server was restarted and counts from zero again.
    """
    page = PAGE.read_text(encoding="utf-8")
    identity = {"model": service.model_name, "version": __version__, "started": started}

    @app.get("/dashboard", include_in_schema=False)
    async def dashboard() -> HTMLResponse:
        headers = {"Content-Security-Policy": CONTENT_POLICY, "X-Content-Type-Options": "nosniff"}
        return HTMLResponse(page, headers=headers)

    @app.get("/dashboard/stats", responses={503: {"description": "the engine stopped"}})
    async def stats() -> JSONResponse:
        """The engine's counters since its start, as JSON."""
        counters = _finite(dataclasses.asdict(await service.stats()))
        content = {**identity, "seconds": time.monotonic(), **counters}
        return JSONResponse(content, headers={"Cache-Control": "no-store"})


def _finite(value: Any) -> Any:
    """The same with None for numbers that JSON does not have."""
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


__all__ = ["add_dashboard"]
