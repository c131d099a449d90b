"""The files in deploy/ name only metrics, labels, flags and probes that a running server has."""

from __future__ import annotations

import ast
import json
import re
import shlex
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.serving.conftest import Server
from trimtab.arguments import Parser, engine_config_from, normalize, settings_from
from trimtab.serving.command import add_parser
from trimtab.serving.config import ServerConfig

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana.json").read_text())
KUBERNETES = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
CONTAINER = KUBERNETES[0]["spec"]["template"]["spec"]["containers"][0]
OF_THE_SCRAPE = {"instance", "le"}  # added by Prometheus; edges of a histogram
QUERIES = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]


def _exposed(server: Server) -> tuple[set[str], dict[str, set[str]]]:
    """Names of all metrics, also of those without samples yet, and the labels of those that have samples."""
    server.post("/v1/completions", prompt="w3 w4 w5", max_tokens=240, temperature=0, ignore_eos=True)
    assert server.post("/v1/completions", prompt=[]).status_code == 400
    text = httpx.get(f"{server.url}/metrics", timeout=30).text
    names = set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))
    labels: dict[str, set[str]] = {}
    for name, inside in re.findall(r"^([\w:]+)\{(.*)\} ", text, re.MULTILINE):
        labels.setdefault(name, set()).update(re.findall(r'(\w+)="', inside))
    return names | set(labels), labels


def test_every_metric_and_label_in_the_grafana_dashboard_is_exposed(server: Server) -> None:
    names, labels = _exposed(server)
    variables = [variable["query"] for variable in DASHBOARD["templating"]["list"]]
    used = {name for query in QUERIES + variables for name in re.findall(r"\b(?:vllm|trimtab):\w+", query)}
    assert len(used) > 30
    assert used <= names, f"not exposed: {sorted(used - names)}"
    for query in QUERIES:
        wanted = {"model_name"}.union(*(re.split(r",\s*", inside) for inside in re.findall(r"by \(([^)]+)\)", query)))
        for name in re.findall(r"\b(?:vllm|trimtab):\w+", query):
            if name in labels and "group_left" not in query:
                assert wanted - OF_THE_SCRAPE <= labels[name], f"{name} has {labels[name]}: {query}"


def test_every_series_of_ours_is_in_the_grafana_dashboard(server: Server) -> None:
    names, _ = _exposed(server)
    ours = {re.sub(r"_(bucket|sum|count|created)$", "", name) for name in names if name.startswith("trimtab:")}
    unused = {name for name in ours if not any(name in query for query in QUERIES)}
    assert unused == set()


def test_the_page_on_deployment_names_metrics_as_they_are(server: Server) -> None:
    names, _ = _exposed(server)
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in names}
    text = (DEPLOY.parent / "docs/howto/deploy.md").read_text()
    used = set(re.findall(r"\b(?:vllm|trimtab):\w+", text))
    assert used - families == {"vllm:lora_requests_info", "vllm:cache_config_info"}  # which it says are missing


def test_panels_do_not_overlap() -> None:
    cells: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        own = {(place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])}
        assert not own & cells, panel["title"]
        assert max(x for x, _ in own) < 24
        cells |= own
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def _service_command() -> list[str]:
    unit = (DEPLOY / "trimtab.service").read_text()
    found = re.search(r"^ExecStart=\S+/trimtab serve (.*)$", unit, re.MULTILINE)
    assert found is not None
    return shlex.split(found[1])


def _docker_command() -> list[str]:
    found = re.search(r"^CMD (\[.*\])$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    assert found is not None
    command: list[str] = ast.literal_eval(found[1])
    return command


@pytest.mark.parametrize(
    "arguments", [_service_command(), _docker_command(), CONTAINER["args"]], ids=["systemd", "docker", "kubernetes"]
)
def test_the_command_takes_the_arguments(arguments: list[str]) -> None:
    parser = Parser(prog="trimtab")
    add_parser(parser.add_subparsers(parser_class=Parser))
    parsed = parser.parse_args(["serve", *normalize(arguments)])
    assert engine_config_from(parsed).model == "smollm2"
    assert settings_from(parsed, ServerConfig).port == 8000


def test_probes_and_scrapes_are_answered(server: Server) -> None:
    kinds = ("startupProbe", "livenessProbe", "readinessProbe")
    paths: set[Any] = {CONTAINER[kind]["httpGet"]["path"] for kind in kinds}
    paths.add(KUBERNETES[0]["spec"]["template"]["metadata"]["annotations"]["prometheus.io/path"])
    prometheus = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    paths.update(job["metrics_path"] for job in prometheus["scrape_configs"])
    paths.update(re.findall(r"127\.0\.0\.1:8000(/\w+)", (DEPLOY / "Dockerfile").read_text()))
    assert paths == {"/health", "/ready", "/metrics"}
    for path in paths:
        assert httpx.get(f"{server.url}{path}", timeout=30).status_code == 200


def test_whoever_stops_it_waits_for_the_draining() -> None:
    arguments = CONTAINER["args"]
    drain = float(arguments[arguments.index("--drain-timeout") + 1])
    assert KUBERNETES[0]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > drain + 5
    found = re.search(r"^TimeoutStopSec=(\d+)$", (DEPLOY / "trimtab.service").read_text(), re.MULTILINE)
    assert found is not None
    command = _service_command()
    assert float(found[1]) > float(command[command.index("--drain-timeout") + 1]) + 5
