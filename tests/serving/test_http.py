"""What surrounds a reply: limits, keys, ids, probes, metrics, and the bytes of a stream."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from tests.serving.conftest import Server, running

LONG = {"prompt": "w3 w4 w5", "temperature": 0, "max_tokens": 240, "ignore_eos": True}


@pytest.fixture(scope="module")
def strict(tiny_model: str) -> Iterator[Server]:
    """A server with a key and low limits."""
    flags = ("--max-num-seqs", "2", "--max-queue", "2", "--request-timeout", "1", "--max-body-mb", "0.001")
    more = ("--api-key", "secret", "--per-request-spec-decode-metrics", "summary", "--enable-log-requests")
    with running(tiny_model, "--dtype", "float32", "--no-speculation", *flags, *more) as server:
        yield server


KEY = {"Authorization": "Bearer secret"}


def test_stream_is_what_openai_sends(server: Server) -> None:
    body = {"messages": [{"role": "user", "content": "w3"}], "max_tokens": 3, "temperature": 0, "ignore_eos": True}
    reply = httpx.post(
        f"{server.url}/v1/chat/completions", json=body | {"stream": True, "stream_options": {"include_usage": True}}
    )
    assert reply.headers["content-type"].startswith("text/event-stream")
    lines = reply.text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    for event in events:
        assert event["id"] == events[0]["id"]
        assert (event["object"], event["model"]) == ("chat.completion.chunk", "tiny")
    *deltas, usage = events
    assert [event["usage"] for event in deltas] == [None] * len(deltas)
    assert deltas[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all(set(event["choices"][0]["delta"]) == {"content"} for event in deltas[1:-1])
    assert deltas[-1]["choices"][0]["delta"] == {}
    assert [event["choices"][0]["finish_reason"] for event in deltas] == [None] * (len(deltas) - 1) + ["length"]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 3


def test_request_ids_come_back(server: Server) -> None:
    body = {"prompt": "w3", "max_tokens": 1}
    reply = httpx.post(f"{server.url}/v1/completions", json=body, headers={"X-Request-Id": "abc.1"})
    assert reply.headers["X-Request-Id"] == "abc.1"
    assert reply.json()["id"] == "cmpl-abc.1"
    forged = httpx.post(f"{server.url}/v1/completions", json=body, headers={"X-Request-Id": "a b\t<script>"})
    assert re.fullmatch(r"[0-9a-f]{32}", forged.headers["X-Request-Id"])


def test_metrics_have_vllms_names(server: Server) -> None:
    server.post("/v1/completions", **LONG)
    counters = (
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:spec_decode_num_drafts_total",
        "vllm:spec_decode_num_draft_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_per_pos_total",
        "vllm:request_success_total",
    )
    for name in counters:
        assert server.metric(name) > 0, name
    for name in ("running", "waiting"):
        assert server.metric(f"vllm:num_requests_{name}") == 0
    assert server.metric("vllm:kv_cache_usage_perc") == 0
    for name in ("time_to_first_token", "inter_token_latency", "e2e_request_latency", "request_queue_time"):
        assert server.metric(f"vllm:{name}_seconds_count") > 0, name
    assert server.metric("vllm:request_success_total", finished_reason="length") > 0
    for position in range(3):
        accepted, verified, drafted = (
            server.metric(f"trimtab:{word}_tokens_by_position_total", position=str(position))
            for word in ("accepted", "verified", "drafted")
        )
        assert accepted <= verified <= drafted
        assert accepted == server.metric("vllm:spec_decode_num_accepted_tokens_per_pos_total", position=str(position))


def test_log_has_sizes_and_no_text(server: Server) -> None:
    server.output()
    server.post("/v1/completions", prompt="w41 w42 w43", max_tokens=2, ignore_eos=True, user="someone")
    server.post("/v1/completions", prompt="w41 w42 w43", max_tokens=2, ignore_eos=True)
    logged = server.output()
    assert "prompt_tokens=3 completion_tokens=2" in logged
    assert "w41" not in logged


def test_without_the_key_only_probes_answer(strict: Server) -> None:
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
        reply = httpx.get(f"{strict.url}/v1/models", headers=headers)
        assert reply.status_code == 401
        assert reply.json()["error"]["code"] == "invalid_api_key"
    assert httpx.get(f"{strict.url}/v1/models", headers=KEY).status_code == 200
    for path in ("/health", "/ready", "/metrics", "/version", "/dashboard", "/dashboard/stats"):
        assert httpx.get(f"{strict.url}{path}").status_code == 200
    with pytest.raises(openai.AuthenticationError):
        strict.client().models.list()


def test_a_full_queue_answers_429_and_when_to_come_back(strict: Server) -> None:
    def ask(_: int) -> httpx.Response:
        return httpx.post(f"{strict.url}/v1/completions", json=LONG, headers=KEY, timeout=60)

    with ThreadPoolExecutor(12) as pool:
        replies = list(pool.map(ask, range(12)))
    refused = [reply for reply in replies if reply.status_code == 429]
    assert refused
    assert all(int(reply.headers["Retry-After"]) >= 1 for reply in refused)
    assert all(reply.json()["error"]["type"] == "rate_limit_error" for reply in refused)
    assert all(reply.status_code in (200, 408, 429) for reply in replies)
    more_than_fits = httpx.post(f"{strict.url}/v1/completions", json=LONG | {"n": 5}, headers=KEY)
    assert more_than_fits.status_code == 400


def test_a_request_that_runs_too_long_is_ended(strict: Server) -> None:
    """Four sequences share two seats, so at least some of them need longer than the second they have."""
    body: dict[str, Any] = LONG | {"n": 4, "max_tokens": 250, "logprobs": 20}
    reply = httpx.post(f"{strict.url}/v1/completions", json=body, headers=KEY, timeout=60)
    assert reply.status_code == 408
    assert reply.json()["error"]["type"] == "timeout_error"
    stream = httpx.post(f"{strict.url}/v1/completions", json=body | {"stream": True}, headers=KEY, timeout=60)
    assert '"type":"timeout_error"' in stream.text
    assert strict.metric("vllm:request_success_total", finished_reason="abort") > 0


@pytest.mark.parametrize("chunked", [False, True])
def test_a_large_body_is_refused(strict: Server, chunked: bool) -> None:
    body = json.dumps({"prompt": "w3 " * 1000, "max_tokens": 1}).encode()
    content: Any = iter([body[:500], body[500:]]) if chunked else body
    headers = KEY | {"Content-Type": "application/json"}
    reply = httpx.post(f"{strict.url}/v1/completions", content=content, headers=headers)
    assert reply.status_code == 413
    assert reply.json()["error"]["type"] == "invalid_request_error"


def test_metrics_of_a_request_come_with_the_flag(strict: Server) -> None:
    reply = httpx.post(f"{strict.url}/v1/completions", json={"prompt": "w3", "max_tokens": 1}, headers=KEY)
    record = reply.json()["metrics"]["speculative_decoding"]
    assert record["num_spec_steps"] == 0
    assert "acceptance_histogram_by_draft_length" not in record


def test_unknown_places_and_methods_are_errors_in_openais_shape(server: Server) -> None:
    for method, path, status in (("GET", "/v1/nothing", 404), ("GET", "/v1/completions", 405), ("GET", "/docs", 404)):
        reply = httpx.request(method, f"{server.url}{path}")
        assert reply.status_code == status
        assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
    assert httpx.get(f"{server.url}/openapi.json").json()["paths"]["/v1/chat/completions"]
