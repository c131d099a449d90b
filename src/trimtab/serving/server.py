"""Runs the HTTP server and the engine together, from the first step to the last."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import uvicorn

from trimtab.engine.engine import Engine
from trimtab.serving.app import create_app
from trimtab.serving.config import ServerConfig
from trimtab.serving.engine_thread import EngineThread
from trimtab.serving.metrics import ServerMetrics
from trimtab.serving.service import Service

logger = logging.getLogger("trimtab.serving")

LAST_REPLIES = 5  # seconds in which replies of ended requests can be sent
DEATH_GRACE = 1.0  # seconds in which open connections learn that the engine is dead, and probes see it


class _Server(uvicorn.Server):
    """uvicorn, with signals as people expect them: the first drains, the second stops at once.

    While it drains it goes on listening, so that probes see that it is not ready and clients are told to go elsewhere.
    """

    def __init__(self, config: uvicorn.Config, service: Service, announce: Callable[[str], None]) -> None:
        super().__init__(config)
        self._service, self._announce = service, announce
        self._loop = asyncio.get_running_loop()
        self._draining: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[Any] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            self._announce(f"http://{f'[{host}]' if ':' in host else host}:{port}")

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        before = {sig: signal.signal(sig, self.handle_exit) for sig in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for sig, handler in before.items():
                signal.signal(sig, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._service.draining:
            os._exit(128 + sig)  # asked twice: the kernel frees what is left
        self._service.draining = True
        self._loop.call_soon_threadsafe(self._start_draining)

    def _start_draining(self) -> None:
        self._draining = self._loop.create_task(self._drain())

    async def _drain(self) -> None:
        if not await self._service.engine.drain(self._service.config.drain_timeout):
            logger.warning("requests still ran after %g s of draining; ending them", self._service.config.drain_timeout)
            self._service.engine.drop_all()
        self.should_exit = True


def serve(engine: Engine, config: ServerConfig, announce: Callable[[str], None]) -> int:
    """Serve until a signal or the engine's death.

    Args:
        announce: given the URL when requests can be sent.

    Returns:
        The process's exit code: 0 after a signal, 1 if the engine died or the address could not be used.
    """
    return asyncio.run(_serve(engine, config, announce))


async def _serve(engine: Engine, config: ServerConfig, announce: Callable[[str], None]) -> int:
    loop = asyncio.get_running_loop()
    thread = EngineThread(engine, on_death=lambda: loop.call_later(DEATH_GRACE, stop))
    model_name = config.served_model_name or engine.config.model
    service = Service(thread, config, ServerMetrics(model_name), model_name)
    options = uvicorn.Config(
        create_app(service, int(time.time())),
        host=config.host,
        port=config.port,
        log_level="warning",
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=LAST_REPLIES,
    )
    server = _Server(options, service, announce)

    def stop() -> None:
        server.should_exit = True

    gc.collect()
    gc.freeze()  # a million objects of torch that live as long as the process: 3 s of a shutdown of 3.3 s
    thread.start()
    try:
        await server.serve()
    except SystemExit:  # uvicorn's way to say that it could not listen; it has logged why
        await thread.stop()
        return 1
    await thread.stop()
    return 0 if thread.error is None and server.started else 1
