"""What adaptive verification costs per step on one core.

Decision: confidence + survival, plan + history, observe; R requests, K positions (the vocabulary does not enter).
Features: time of the default features of 16 x 49,152 logits over that of one softmax of the same logits, run in turn,
both into memory that is there already (the softmax remains for a sampler to go on with);
also from probabilities that a sampler has already, for peaked rows, and for all lossless features at once.

Run: python benchmarks/policy_overhead.py
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from provenance import write_result

from trimtab.policy import (
    CostCurve,
    DraftSignals,
    PlanInput,
    PlannerHistory,
    VerificationOutcome,
    draft_features,
    draft_features_from_probs,
    make_confidence,
    make_planner,
    survival_probs,
    update_history,
)

ALL_FEATURES = ("logit_q_max", "log_q_max", "neg_log_neg_log_q_max", "top2_margin", "entropy")


def alternate(actions: dict[str, Callable[[], object]], repeats: int) -> dict[str, dict[str, float]]:
    """Milliseconds of each action, all run in turn so that other load on the machine hits them alike."""
    times: dict[str, list[float]] = {name: [] for name in actions}
    for repeat in range(repeats + 3):
        for name, action in actions.items():
            action()
            start = time.perf_counter()
            action()
            if repeat >= 3:
                times[name].append(1e3 * (time.perf_counter() - start))
    return {
        name: {"median_ms": round(statistics.median(values), 4), "fastest_ms": round(min(values), 4)}
        for name, values in times.items()
    }


def feature_times(num_rows: int, vocabulary: int, repeats: int) -> dict[str, object]:
    """Times of features and softmax, and their ratios."""
    logits = 4 * torch.randn(num_rows, vocabulary, generator=torch.Generator().manual_seed(0))
    peaked = logits.clone()
    peaked[:, 7] = 45.0
    probs, ones = logits.softmax(-1), torch.ones(num_rows)
    output = torch.empty_like(
        logits
    )  # a softmax that had to allocate would be slower at times, and the ratio flattered
    default = ("logit_q_max",)
    times = alternate(
        {
            "softmax": lambda: torch.softmax(logits, dim=-1, out=output),
            "default": lambda: draft_features(logits, ones, default, probs_out=output),
            "default, every row peaked": lambda: draft_features(peaked, ones, default, probs_out=output),
            "default, from probabilities": lambda: draft_features_from_probs(probs, default),
            "all lossless": lambda: draft_features(logits, ones, ALL_FEATURES, probs_out=output),
        },
        repeats,
    )
    ratios = {
        name: {kind: round(value[kind] / times["softmax"][kind], 3) for kind in ("median_ms", "fastest_ms")}
        for name, value in times.items()
    }
    return {"rows": num_rows, "vocabulary": vocabulary, "times": times, "ratio_to_softmax": ratios}


def decision_times(num_requests: int, num_positions: int, repeats: int) -> dict[str, object]:
    """Time of each part of a step's decision for the online estimator, refits included."""
    rng = np.random.default_rng(0)
    source = make_confidence("estimator", num_positions)
    signals = DraftSignals(
        features=torch.from_numpy(rng.normal(1, 2, (num_requests, num_positions, 1)).astype(np.float32)),
        num_drafted=torch.full((num_requests,), num_positions),
        q_max=torch.rand(num_requests, num_positions),
    )
    accepted = torch.from_numpy(rng.integers(0, num_positions + 1, num_requests))
    verified = torch.full((num_requests,), num_positions)
    teaches, keys = torch.ones(num_requests, dtype=torch.bool), torch.arange(num_requests)
    cost, planner, history = CostCurve.linear(20.0, 0.5), make_planner(), PlannerHistory.start(num_positions)
    times: dict[str, list[float]] = {"predict": [], "plan": [], "observe": []}
    for _ in range(repeats):
        marks = [time.perf_counter()]
        survival = survival_probs(source.confidence(signals), signals.num_drafted)
        marks.append(time.perf_counter())
        inputs = PlanInput(survival.numpy(), signals.num_drafted.numpy(), num_requests, cost, history)
        history = update_history(history, inputs, planner.plan(inputs))
        marks.append(time.perf_counter())
        source.observe(signals, VerificationOutcome(verified, accepted, teaches, keys))
        marks.append(time.perf_counter())
        for name, start, end in zip(times, marks, marks[1:], strict=False):
            times[name].append(1e3 * (end - start))
    totals = np.array(list(times.values())).sum(0)
    return {
        "requests": num_requests,
        "positions": num_positions,
        "median_ms": {name: round(statistics.median(values), 4) for name, values in times.items()},
        "total_median_ms": round(float(np.median(totals)), 4),
        "total_mean_ms": round(float(totals.mean()), 4),
    }


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--output", default="policy_overhead.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    result = {
        "decision": [decision_times(requests, 8, 5 * arguments.repeats) for requests in (1, 16, 64, 256)],
        "features": feature_times(16, 49_152, arguments.repeats),
    }
    for part in result["decision"]:
        print(part)
    print(result["features"])
    write_result(arguments.output, result)


if __name__ == "__main__":
    main()
