"""The live page in a real browser, and the numbers that it polls."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.serving.conftest import Server, running

TRAFFIC = {"prompt": "w41 w42 w43", "temperature": 0, "max_tokens": 200, "ignore_eos": True, "user": "someone"}
TEXTS = {"model", "version", "confidence", "planner"}  # the only fields that are not numbers
HOSTILE = "<img src=x onerror=\"document.title='taken'\">" + "long" * 20


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium as the system installs it."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed; see the dev extra")
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("chromium is not installed: apt-get install chromium")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def plain(tiny_model: str) -> Iterator[Server]:
    """A server with a key and a name that is no name, without speculation."""
    flags = ("--served-model-name", HOSTILE, "--api-key", "secret", "--no-speculation")
    with running(tiny_model, "--dtype", "float32", *flags) as server:
        yield server


def _stats(server: Server) -> dict[str, Any]:
    reply = httpx.get(f"{server.url}/dashboard/stats", timeout=30)
    assert reply.status_code == 200
    content: dict[str, Any] = reply.json()
    return content


def _texts(value: Any, field: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _texts(item, key)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item, field)
    elif isinstance(value, str):
        yield field, value


def _number(page: Any, tile: str) -> float:
    return float(re.sub(r"[^\d.]", "", page.locator(f"#{tile}").inner_text()) or "nan")


def test_stats_are_the_engines_counters(server: Server) -> None:
    server.post("/v1/completions", **TRAFFIC)
    stats = _stats(server)
    assert stats["num_generated_tokens"] == server.metric("vllm:generation_tokens_total") >= 200
    assert stats["num_drafted"] == server.metric("trimtab:drafted_tokens_total") > 0
    policy = stats["policy"]
    assert len(policy["cost_points"]) > 1
    assert 0 < len(policy["cost_measured"]) <= 256
    assert policy["reliability"]
    for predicted, observed, count in policy["reliability"]:
        assert 0 <= predicted <= 1
        assert 0 <= observed <= 1
        assert count > 0


def test_stats_hold_no_text_of_requests(server: Server) -> None:
    server.post("/v1/completions", **TRAFFIC)
    texts = dict(_texts(_stats(server)))
    assert set(texts) == TEXTS
    assert not re.search(r"w4\d|someone", " ".join(texts.values()))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [(1280, 800), (390, 844)], ids=["desktop", "phone"])
def test_page_shows_what_the_server_does(server: Server, browser: Any, size: tuple[int, int], scheme: str) -> None:
    server.post("/v1/completions", **TRAFFIC)
    context = browser.new_context(viewport={"width": size[0], "height": size[1]}, color_scheme=scheme)
    page, complaints, asked = context.new_page(), [], set()
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: asked.add(request.url))
    page.goto(f"{server.url}/dashboard")
    page.wait_for_selector("#state.live")
    _until(page, "polls.length >= 2")
    before = page.evaluate("[latest().num_generated_tokens, latest().num_verified]")
    assert f"{before[0]:,} since start" in page.inner_text("#tiles")
    server.post("/v1/completions", **TRAFFIC)
    _until(page, f"latest().num_generated_tokens >= {before[0] + 200}")
    assert f"{before[0] + 200:,} since start" in page.inner_text("#tiles")
    assert page.evaluate("latest().num_verified") > before[1]
    assert page.evaluate("Math.max(...polls.map(poll => poll.rates ? poll.rates.generated : 0))") > 0
    assert 1 <= _number(page, "length") <= 4

    assert page.locator(".card").count() == page.locator(".card svg, .card dl").count() == 12  # every chart has data
    assert page.locator(".card svg[role=img][aria-label]").count() == 11
    assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    brightness = sum(int(part) for part in re.findall(r"\d+", background)[:3]) / 3
    assert brightness > 200 if scheme == "light" else brightness < 60
    page.mouse.move(*_middle(page, ".plot"))
    assert page.evaluate("hover") < 0
    assert complaints == []
    assert asked == {f"{server.url}/dashboard", f"{server.url}/dashboard/stats"}
    context.close()


def _until(page: Any, condition: str) -> None:
    """Wait as a user would: the page's own policy forbids the evaluation that wait_for_function does inside it."""
    for _ in range(300):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(100)
    pytest.fail(f"not so after 30 s: {condition}")


def _middle(page: Any, selector: str) -> tuple[float, float]:
    page.locator(selector).first.scroll_into_view_if_needed()
    box = page.locator(selector).first.bounding_box()
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


def test_page_escapes_names_and_says_what_is_missing(plain: Server, browser: Any) -> None:
    assert httpx.get(f"{plain.url}/v1/models").status_code == 401
    context = browser.new_context(viewport={"width": 390, "height": 844})
    page, errors = context.new_page(), []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(f"{plain.url}/dashboard")
    page.wait_for_selector("#state.live")
    assert page.inner_text("#model") == HOSTILE
    assert page.locator("img").count() == 0
    assert page.title().startswith("<img")
    assert page.inner_text("#policy") == "no speculation"
    assert page.get_by_text("Speculation is off.").count() >= 4
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    plain.process.kill()
    page.wait_for_selector("#state.lost")
    assert "what you see is old" in page.inner_text("#state")
    assert errors == []
    context.close()
