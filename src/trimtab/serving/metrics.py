"""What ``/metrics`` says: vLLM's names verbatim, so that its dashboards work, and ours under ``trimtab:``."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from trimtab.engine.request import RequestOutput
from trimtab.engine.stats import EngineStats

SHORT = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40, 80)
LONG = (0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 60, 120, 240, 480, 960)
Labels = Mapping[str, str]
_Family = GaugeMetricFamily | CounterMetricFamily


class ServerMetrics:
    """Counts requests as they pass and renders everything, the engine's own counters included."""

    def __init__(self, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._label = {"model_name": model_name}
        self._engine = _EngineCollector(self._label)
        self._registry.register(self._engine)
        self._first_token = self._histogram("vllm:time_to_first_token_seconds", "Arrival to first token", SHORT)
        self._between = self._histogram("vllm:inter_token_latency_seconds", "Time between outputs of a request", SHORT)
        self._whole = self._histogram("vllm:e2e_request_latency_seconds", "Arrival to last token", LONG)
        self._queue = self._histogram("vllm:request_queue_time_seconds", "Arrival to first scheduling", LONG)
        self._refused = Counter(
            "trimtab:requests_refused",
            "Requests that were not served, by HTTP status",
            ["model_name", "status"],
            registry=self._registry,
        )
        self._last_output: dict[tuple[str, int], float] = {}

    def _histogram(self, name: str, text: str, buckets: Iterable[float]) -> Histogram:
        metric = Histogram(name, text, ["model_name"], buckets=tuple(buckets), registry=self._registry)
        return metric.labels(**self._label)

    def record(self, output: RequestOutput) -> None:
        """Take the times of one output."""
        now, key, times = time.monotonic(), (output.request_id, output.index), output.metrics
        if output.token_ids:
            before = self._last_output.get(key)
            if before is None:
                self._first_token.observe(now - times.arrival)
                self._queue.observe(max(0.0, (times.scheduled or times.arrival) - times.arrival))
            else:
                self._between.observe(now - before)
            self._last_output[key] = now
        if output.finished:
            self._last_output.pop(key, None)
            self._whole.observe(now - times.arrival)

    def forget(self, request_id: str, num_choices: int) -> None:
        """Drop what is kept of a request that ended early."""
        for index in range(num_choices):
            self._last_output.pop((request_id, index), None)

    def refused(self, status: int) -> None:
        self._refused.labels(**self._label, status=str(status)).inc()

    def render(self, stats: EngineStats) -> bytes:
        """The page in Prometheus' text format."""
        self._engine.stats = stats
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    """Turns a snapshot of the engine's counters into metrics at each scrape."""

    def __init__(self, label: Labels) -> None:
        self.stats: EngineStats | None = None
        self._label = label

    def collect(self) -> Iterator[Metric]:
        if self.stats is None:
            return
        yield from self._vllm(self.stats)
        yield from self._slots(self.stats)
        yield from self._policy(self.stats)

    def _vllm(self, stats: EngineStats) -> Iterator[Metric]:
        yield self._gauge("vllm:num_requests_running", "Requests in execution", stats.num_running)
        yield self._gauge("vllm:num_requests_waiting", "Requests that wait for execution", stats.num_waiting)
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of the KV cache in use, 1 is all", stats.kv_usage)
        yield self._counter("vllm:prompt_tokens", "Prompt tokens computed", stats.num_prompt_tokens)
        yield self._counter("vllm:generation_tokens", "Tokens generated", stats.num_generated_tokens)
        yield self._counter("vllm:num_preemptions", "Preemptions", stats.num_preemptions)
        yield self._counter("vllm:spec_decode_num_drafts", "Drafts", stats.num_drafts)
        yield self._counter("vllm:spec_decode_num_draft_tokens", "Draft tokens that were verified", stats.num_verified)
        yield self._counter("vllm:spec_decode_num_accepted_tokens", "Draft tokens accepted", stats.num_accepted)
        yield self._by(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted, by draft position",
            "position",
            dict(enumerate(stats.accepted_by_position)),
        )
        reasons = {"stop": 0, "length": 0, "abort": 0, "error": 0} | stats.finished_by_reason
        yield self._by("vllm:request_success", "Finished requests, by reason", "finished_reason", reasons)

    def _slots(self, stats: EngineStats) -> Iterator[Metric]:
        yield self._counter("trimtab:drafted_tokens", "Tokens drafted", stats.num_drafted)
        for word, counts in (
            ("drafted", stats.drafted_by_position),
            ("verified", stats.verified_by_position),
            ("accepted", stats.accepted_by_position),
        ):
            name = f"trimtab:{word}_tokens_by_position"
            yield self._by(name, f"Draft tokens {word}, by draft position", "position", dict(enumerate(counts)))
        yield self._counter("trimtab:decode_steps", "Decode steps, one per request and step", stats.num_decode_steps)
        yield self._counter("trimtab:engine_steps", "Steps of the engine", stats.num_steps)
        yield self._counter("trimtab:cached_tokens", "Prompt tokens found in the prefix cache", stats.num_cached_tokens)
        yield self._budget(stats)
        yield self._by("trimtab:step_seconds", "Time in steps, by phase", "phase", stats.phase_seconds)
        yield self._by("trimtab:fallbacks", "Steps without drafts, by reason", "reason", stats.fallbacks_by_reason)
        yield self._counter(
            "trimtab:untrimmed_drafts", "Drafts verified in full to explore", stats.policy.num_untrimmed
        )

    def _budget(self, stats: EngineStats) -> Metric:
        """How many slots steps verified, as a histogram with an edge at every power of two."""
        edges = [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
        counts = [
            (str(edge), float(sum(n for size, n in stats.budget_histogram.items() if size <= edge))) for edge in edges
        ]
        counts.append(("+Inf", float(sum(stats.budget_histogram.values()))))
        metric = HistogramMetricFamily(
            "trimtab:verification_budget", "Draft slots verified per step", labels=["model_name"]
        )
        total = float(sum(size * n for size, n in stats.budget_histogram.items()))
        metric.add_metric([self._label["model_name"]], counts, total)
        return metric

    def _policy(self, stats: EngineStats) -> Iterator[Metric]:
        policy = stats.policy
        yield self._gauges("trimtab:estimator_slope", "Slopes of the estimator", "feature", policy.slopes)
        intercepts = dict(enumerate(policy.intercepts))
        yield self._gauges("trimtab:estimator_intercept", "Intercepts of the estimator", "position", intercepts)
        survival = dict(enumerate(policy.mean_survival))
        yield self._gauges("trimtab:predicted_survival", "Mean predicted survival of drafts", "position", survival)
        yield self._counter("trimtab:estimator_refits", "Refits of the estimator", policy.num_refits)
        yield self._counter("trimtab:estimator_refused_refits", "Refits not taken", policy.num_refused_refits)
        for name, text, value in (
            ("trimtab:estimator_log_loss", "Log-loss of the last round, scored before it was learned", policy.log_loss),
            ("trimtab:estimator_ece", "Calibration error of the last round, scored before it was learned", policy.ece),
            ("trimtab:cost_relative_error", "Error of the predicted step time", policy.cost_relative_error),
        ):
            if value is not None:
                yield self._gauge(name, text, value)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        return self._gauges(name, text, None, {"": value})

    def _counter(self, name: str, text: str, value: float) -> Metric:
        return self._by(name, text, None, {"": value})

    def _gauges(self, name: str, text: str, label: str | None, values: Mapping[Any, float]) -> Metric:
        return self._fill(GaugeMetricFamily(name, text, labels=self._names(label)), label, values)

    def _by(self, name: str, text: str, label: str | None, values: Mapping[Any, float]) -> Metric:
        return self._fill(CounterMetricFamily(name, text, labels=self._names(label)), label, values)

    def _names(self, label: str | None) -> list[str]:
        return [*self._label, *([label] if label else [])]

    def _fill(self, metric: _Family, label: str | None, values: Mapping[Any, float]) -> Metric:
        for key, value in values.items():
            metric.add_metric([*self._label.values(), *([str(key)] if label else [])], value)
        return metric
