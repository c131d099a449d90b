"""Real servers, started as users start them."""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.tiny import save_tiny_model

START_SECONDS = 120


@dataclass
class Server:
    """A running `trimtab serve`."""

    process: subprocess.Popen[str]
    url: str
    lines: queue.Queue[str]

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="unused", max_retries=0, **options)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, timeout=60)

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric's samples that have these labels."""
        found = []
        for line in httpx.get(f"{self.url}/metrics", timeout=30).text.splitlines():
            match = re.fullmatch(r"([\w:]+)(?:\{(.*)\})? (\S+)", line)
            if (
                match
                and match[1] == name
                and all(f'{key}="{value}"' in (match[2] or "") for key, value in labels.items())
            ):
                found.append(float(match[3]))
        assert found, f"no metric {name} {labels}"
        return sum(found)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def output(self) -> str:
        """What it has printed since the ready line."""
        text = []
        while not self.lines.empty():
            text.append(self.lines.get())
        return "".join(text)


@contextmanager
def running(model: str, *flags: str, env: dict[str, str] | None = None) -> Iterator[Server]:
    """A server on a free port, until the block ends."""
    command = [sys.executable, "-m", "trimtab.cli", "serve", model, "--port", "0", *flags]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | (env or {})
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1, env=environment
    )
    lines: queue.Queue[str] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)
        process.stdout.close()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        seen = ""
        while not (found := re.search(r"ready: .* at (http://\S+)", seen)):
            if process.poll() is not None:
                reader.join(5)
                while not lines.empty():
                    seen += lines.get()
                pytest.fail(f"the server ended with {process.returncode}:\n{seen}")
            try:
                seen += lines.get(timeout=START_SECONDS)
            except queue.Empty:
                pytest.fail(f"the server was not ready after {START_SECONDS} s:\n{seen}")
        lines.get(timeout=5)  # the curl example
        yield Server(process, found[1], lines)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait(10)
        reader.join(5)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random model whose greedy output does not end by itself soon."""
    directory: Path = tmp_path_factory.mktemp("serving") / "tiny"
    directory.mkdir()
    return save_tiny_model(directory)


@pytest.fixture(scope="session")
def server(tiny_model: str) -> Iterator[Server]:
    """The server that most tests share: tiny model, n-gram drafts."""
    speculation = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}'
    flags = ("--dtype", "float32", "--served-model-name", "tiny", "--speculative-config", speculation)
    with running(tiny_model, *flags, "--max-num-seqs", "8", "--enable-log-requests") as started:
        yield started


@pytest.fixture(scope="session")
def client(server: Server) -> openai.OpenAI:
    return server.client()
