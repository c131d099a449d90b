"""What must not go wrong: bad input of every kind, clients that leave, steps that fail, servers that stop."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serving.conftest import Server, running

LONG = {"prompt": "w3 w4 w5", "temperature": 0, "max_tokens": 240, "ignore_eos": True}


def wait_until(true: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.05)


def idle(server: Server) -> bool:
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    return all(server.metric(name) == 0 for name in names)


BAD_FIELDS: list[tuple[str, dict[str, Any]]] = [
    ("stream", {"stream": "yes"}),
    ("temperature", {"temperature": True}),
    ("temperature", {"temperature": "0.5"}),
    ("prompt", {"prompt": [True]}),
    ("prompt", {"prompt": ["a", 1]}),
    ("prompt", {"prompt": None}),
    ("prompt", {"prompt": {"text": "a"}}),
    ("logprobs", {"logprobs": True}),
    ("stop", {"stop": [""]}),
    ("stop", {"stop": 3}),
    ("logit_bias", {"logit_bias": {"five": 1}}),
    ("max_tokens", {"max_tokens": 1.5}),
    ("max_tokens", {"max_tokens": 10**40}),
    ("seed", {"seed": 2**63}),
    ("user", {"user": "\ud800"}),
    ("best_of", {"best_of": 2}),
    ("suffix", {"suffix": "end"}),
]


@pytest.mark.parametrize(("param", "fields"), BAD_FIELDS, ids=lambda value: json.dumps(value)[:40])
def test_a_value_of_the_wrong_kind_is_refused_by_name(server: Server, param: str, fields: dict[str, Any]) -> None:
    body = json.dumps({"prompt": "w3", "max_tokens": 1} | fields)
    reply = httpx.post(f"{server.url}/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert ".str" not in error["message"]  # pydantic's name for one form of a union


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"prompt": "w3", "temperature": NaN}',
        b'{"prompt": "w3", "seed": ' + b"9" * 5000 + b"}",
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "w3", "\\ud800": 1}',
        b'{"prompt": "w3", "model": "\\ud800"}',
    ],
)
def test_a_body_that_is_no_request_is_a_client_error(server: Server, body: bytes) -> None:
    reply = httpx.post(f"{server.url}/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert reply.status_code in (400, 404), reply.text
    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}


def test_a_hundred_thousand_mistakes_cost_no_more_than_one(server: Server) -> None:
    start = time.monotonic()
    reply = server.post("/v1/completions", prompt=["w3"] * 100_000 + [1])
    assert reply.status_code == 400
    assert time.monotonic() - start < 2.0  # every one of them reported took 4 s


def test_clients_that_leave_free_everything_and_disturb_nobody(server: Server) -> None:
    reference = server.post("/v1/completions", **LONG).json()["choices"][0]["text"]

    def leave_while_streaming(seed: int) -> bool:
        draws = random.Random(seed)
        with httpx.stream("POST", f"{server.url}/v1/completions", json=LONG | {"stream": True}, timeout=60) as reply:
            for count, _ in enumerate(reply.iter_lines()):
                if count > draws.randint(0, 20):
                    break
        return True

    def leave_while_waiting(seed: int) -> bool:
        with contextlib.suppress(httpx.TimeoutException):
            httpx.post(f"{server.url}/v1/completions", json=LONG, timeout=0.05 + random.Random(seed).random() / 5)
        return True

    def stay(_seed: int) -> bool:
        answer = server.post("/v1/completions", **LONG)
        return bool(answer.json()["choices"][0]["text"] == reference)

    kinds = [leave_while_streaming, leave_while_waiting, leave_while_streaming, stay]
    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(lambda number: kinds[number % 4](number), range(48)))
    wait_until(lambda: idle(server))


def test_half_a_body_leaves_nothing_behind(server: Server) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
    for _ in range(20):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(head + b'{"prompt')
    wait_until(lambda: idle(server))
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_a_slow_reader_holds_up_nobody(server: Server) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    body = json.dumps(LONG | {"stream": True, "n": 4, "logprobs": 5}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with socket.create_connection((host, int(port))) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        assert server.post("/v1/completions", **LONG).status_code == 200
        wait_until(lambda: idle(server))


POISON = """
import trimtab.models.executor as executor

forward = executor.ModelExecutor.forward

def poisoned(self, batch):
    if 63 in batch.token_ids.tolist():
        raise RuntimeError("secret detail")
    return forward(self, batch)

executor.ModelExecutor.forward = poisoned
"""


@contextlib.contextmanager
def poisoned(model: str, directory: Path) -> Iterator[Server]:
    """A server whose forward pass fails when it meets token 63."""
    (directory / "sitecustomize.py").write_text(POISON)
    with running(model, "--dtype", "float32", "--no-speculation", env={"PYTHONPATH": str(directory)}) as server:
        yield server


def test_a_failing_step_ends_its_requests_and_the_engine_goes_on(tiny_model: str, tmp_path: Path) -> None:
    good = {"prompt": [5, 6, 7], "temperature": 0, "max_tokens": 4, "logit_bias": {"63": -100}}
    with poisoned(tiny_model, tmp_path) as server:
        before = server.post("/v1/completions", **good)
        failed = server.post("/v1/completions", prompt=[63], max_tokens=4)
        assert failed.status_code == 500
        assert "secret" not in failed.text
        after = server.post("/v1/completions", **good)
        assert after.json()["choices"] == before.json()["choices"]
        assert httpx.get(f"{server.url}/health").status_code == 200
        wait_until(lambda: idle(server))
        assert "secret detail" in server.output()


def test_an_engine_that_always_fails_dies_red_and_exits_with_one(tiny_model: str, tmp_path: Path) -> None:
    with poisoned(tiny_model, tmp_path) as server:
        codes = []
        with contextlib.suppress(httpx.TransportError):
            for _ in range(8):
                codes.append(server.post("/v1/completions", prompt=[63], max_tokens=4).status_code)
                if codes[-1] == 503:
                    codes.append(httpx.get(f"{server.url}/health").status_code)
                    break
        assert codes == [500, 500, 500, 500, 503, 503]
        assert server.process.wait(20) == 1


def test_draining_finishes_what_runs_and_refuses_what_comes(tiny_model: str) -> None:
    flags = ("--dtype", "float32", "--no-speculation")
    with (
        running(tiny_model, *flags) as server,
        ThreadPoolExecutor(1) as pool,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        running_request = pool.submit(server.post, "/v1/completions", **LONG | {"n": 32})
        wait_until(lambda: server.metric("vllm:num_requests_running") > 0)
        server.signal(signal.SIGTERM)
        wait_until(lambda: client.get("/ready").status_code == 503)
        assert client.get("/health").status_code == 200
        late = client.post("/v1/completions", json=LONG)
        assert late.status_code == 503
        assert int(late.headers["Retry-After"]) > 0
        assert running_request.result().status_code == 200
        assert server.process.wait(20) == 0


def test_what_outlasts_the_draining_is_told_so(tiny_model: str) -> None:
    flags = ("--dtype", "float32", "--no-speculation", "--drain-timeout", "0.2")
    with running(tiny_model, *flags) as server, ThreadPoolExecutor(1) as pool:
        cut = pool.submit(server.post, "/v1/completions", **LONG | {"n": 64})
        wait_until(lambda: server.metric("vllm:num_requests_running") > 0)
        server.signal(signal.SIGTERM)
        reply = cut.result()
        assert reply.status_code == 503
        assert reply.json()["error"]["type"] == "service_unavailable_error"
        assert server.process.wait(20) == 0
        assert "Traceback" not in server.output()


def test_a_second_signal_stops_at_once(tiny_model: str) -> None:
    with running(tiny_model, "--dtype", "float32", "--no-speculation") as server:
        thread = threading.Thread(target=lambda: suppressed_post(server))
        thread.start()
        wait_until(lambda: server.metric("vllm:num_requests_running") > 0)
        server.signal(signal.SIGTERM)
        time.sleep(0.1)
        server.signal(signal.SIGTERM)
        assert server.process.wait(2) == 128 + signal.SIGTERM
        thread.join()


def suppressed_post(server: Server) -> None:
    with contextlib.suppress(httpx.TransportError):
        server.post("/v1/completions", **LONG | {"n": 64})


def test_aiperf_takes_the_acceptance_record(server: Server) -> None:
    """The conditions that AIPerf 0.13 checks before it takes a record."""
    for fields in (LONG | {"n": 1}, {"prompt": "w3", "max_tokens": 1}):
        reply = server.post("/v1/completions", **fields, include_metrics=True).json()
        record = reply["metrics"]["speculative_decoding"]
        histogram = record["acceptance_histogram"]
        assert all(type(count) is int for count in histogram)
        assert len(histogram) == record["num_spec_tokens"] + 1
        assert sum(histogram) == record["num_spec_steps"]
        assert sum(length * count for length, count in enumerate(histogram)) == record["num_accepted_draft_tokens"]
        assert record["num_accepted_draft_tokens"] <= record["num_draft_tokens"]
        assert isinstance(record["mean_acceptance_length"], float)
        assert isinstance(record["draft_acceptance_rate"], float)
    assert record["num_spec_steps"] == 0
