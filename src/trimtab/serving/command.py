"""``trimtab serve``: flags in, a running server out."""

from __future__ import annotations

import argparse
import errno
import logging
import os
import shlex
import socket
import sys
import time
from typing import Any

from trimtab.arguments import UsageError, add_engine_arguments, add_settings, engine_config_from, settings_from
from trimtab.serving.config import ServerConfig

EXAMPLES = """examples:
  trimtab serve smollm2
  trimtab serve smollm2 --port 8080 --api-key secret --max-num-seqs 32
  trimtab serve ./Qwen3-0.6B --dtype bfloat16 --served-model-name qwen3
  trimtab serve smollm2 --speculative-config '{"method": "ngram", "num_speculative_tokens": 6}'
  trimtab serve smollm2 --speculative-config.enable_adaptive_verification false
  trimtab serve smollm2 --no-speculation
One SIGTERM or Ctrl-C lets running requests end, a second one stops at once."""


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "serve", description="Serve a model over an OpenAI-compatible HTTP API.", epilog=EXAMPLES
    )
    add_engine_arguments(parser)
    add_settings(parser.add_argument_group("server"), ServerConfig)
    parser.set_defaults(run=_serve)


def _serve(arguments: argparse.Namespace) -> int:
    config = settings_from(arguments, ServerConfig)
    if config.api_key is None:
        config = config.model_copy(update={"api_key": os.environ.get("TRIMTAB_API_KEY") or None})
    engine_config = engine_config_from(arguments)
    _check_address(config.host, config.port)  # before the model loads: nobody likes to wait for this error
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    from trimtab.serving.server import serve
    from trimtab.terminal import load

    start = time.monotonic()
    llm = load(engine_config)
    name = config.served_model_name or engine_config.model
    return serve(llm.engine, config, lambda url: _announce(url, name, time.monotonic() - start, config))


def _check_address(host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise UsageError(f"--port: {port} is in use on {host}; stop what uses it or take another") from error
            reason = error.strerror or str(error)
            raise UsageError(f"--host, --port: can not listen on {host}:{port} ({reason.lower()})") from error


def _announce(url: str, name: str, seconds: float, config: ServerConfig) -> None:
    key = ' -H "Authorization: Bearer $TRIMTAB_API_KEY"' if config.api_key else ""
    body = f'{{"model": "{name}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
    lines = [
        f"ready: {name} at {url} after {seconds:.1f} s; try",
        f'  curl {url}/v1/chat/completions{key} -H "Content-Type: application/json" -d {shlex.quote(body)}',
    ]
    print("\n".join(lines), file=sys.stderr, flush=True)
