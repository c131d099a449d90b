"""Speed of the engine: tokens per second at several concurrencies, and where the time of a step goes.

Every configuration is run in turn, several times over, so that other load on the machine hits all alike; the median
counts. Peers that are installed run in the same loop in processes of their own (`--peer NAME=COMMAND`): the command
gets ``--prompts FILE --concurrency N --max-tokens M`` appended and prints one JSON object with "tokens" and "seconds".

Run: python benchmarks/engine.py --prompts FILE.jsonl --threads 2
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from greedy_equality import read_prompts
from provenance import write_result
from torch.profiler import ProfilerActivity, profile

from trimtab.engine.config import EngineConfig
from trimtab.engine.engine import Engine
from trimtab.engine.sampling_params import SamplingParams

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "int8": {"dtype": "int8"},
    "int8 + ngram": {"dtype": "int8", "speculative_config": {"method": "ngram"}},
    "int8 + default drafter": {"dtype": "int8", "speculative_config": {}},
}


def serve(engine: Engine, prompts: Sequence[list[int]], params: SamplingParams, concurrency: int) -> dict[str, float]:
    """Closed loop: as many requests in flight as asked until all prompts are answered."""
    before = engine.stats()
    waiting = list(enumerate(prompts))[::-1]
    in_flight = tokens = 0
    start = time.perf_counter()
    while waiting or engine.has_unfinished:
        while waiting and in_flight < concurrency:
            index, prompt = waiting.pop()
            engine.add_request(str(index), prompt, params)
            in_flight += 1
        for output in engine.step():
            tokens += len(output.token_ids)
            in_flight -= output.finished
    seconds = time.perf_counter() - start
    after = engine.stats()
    phases = {name: after.phase_seconds[name] - before.phase_seconds[name] for name in after.phase_seconds}
    steps = max(after.num_steps - before.num_steps, 1)
    decoded = max(after.num_decode_steps - before.num_decode_steps, 1)
    return {
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "acceptance_length": 1 + (after.num_accepted - before.num_accepted) / decoded,
        "num_drafted": after.num_drafted - before.num_drafted,
        "num_verified": after.num_verified - before.num_verified,
        "num_accepted": after.num_accepted - before.num_accepted,
        **{f"{name}_ms_per_step": 1e3 * value / steps for name, value in phases.items()},
        "outside_phases_ms_per_step": 1e3 * (seconds - sum(phases.values())) / steps,
    }


def inside_forward(engine: Engine, prompts: Sequence[list[int]], params: SamplingParams) -> dict[str, float]:
    """Share of the operators' own time in linear layers, attention and the rest, by torch's profiler."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        serve(engine, prompts, params, len(prompts))
    shares: dict[str, float] = defaultdict(float)
    for event in profiler.key_averages():
        name = event.key
        kind = "other operators"
        if any(word in name for word in ("linear", "addmm", "aten::mm", "matmul", "int8", "_int_mm")):
            kind = "linear layers"
        elif "attention" in name or "index_select" in name or "index_copy" in name:
            kind = "attention and cache"
        elif "softmax" in name or "topk" in name or "argmax" in name or "cumsum" in name:
            kind = "sampling"
        shares[kind] += event.self_cpu_time_total
    total = sum(shares.values())
    return {kind: value / total for kind, value in shares.items()}


def run_peer(command: str, arguments: argparse.Namespace, concurrency: int) -> dict[str, float]:
    """One run of another engine; its last line of output is a JSON object."""
    sizes = ["--concurrency", str(concurrency), "--max-tokens", str(arguments.max_tokens)]
    full = [*shlex.split(command), "--prompts", *map(str, arguments.prompts), *sizes]
    output = subprocess.run(full, capture_output=True, text=True, check=True).stdout
    result: dict[str, float] = json.loads(output.strip().splitlines()[-1])
    return result | {"tokens_per_second": result["tokens"] / result["seconds"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompts", type=Path, nargs="+", required=True)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--configurations", nargs="+", default=["float32", "int8"], choices=list(CONFIGURATIONS))
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=COMMAND")
    parser.add_argument("--output", default="engine.json")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    params = SamplingParams(
        temperature=arguments.temperature, top_p=arguments.top_p, max_tokens=arguments.max_tokens, ignore_eos=True
    )
    engines = {
        name: Engine(
            EngineConfig(
                model=arguments.model,
                max_model_len=1024,
                enable_prefix_caching=False,
                num_threads=arguments.threads,
                max_num_seqs=max(arguments.concurrency),
                **CONFIGURATIONS[name],
            )
        )
        for name in arguments.configurations
    }
    peers = dict(text.split("=", 1) for text in arguments.peer)
    tokenizer = next(iter(engines.values())).tokenizer
    prompts = [p for p in read_prompts(arguments.prompts, tokenizer, 200) if len(p) <= 512]
    runs: dict[str, dict[int, list[dict[str, float]]]] = defaultdict(lambda: defaultdict(list))
    for repeat in range(arguments.repeats):
        for concurrency in arguments.concurrency:
            chosen = prompts[repeat * 32 :][: max(2 * concurrency, 2)]
            for name, engine in engines.items():
                runs[name][concurrency].append(serve(engine, chosen, params, concurrency))
            for name, command in peers.items():
                runs[name][concurrency].append(run_peer(command, arguments, concurrency))
            for name in (*engines, *peers):
                print(concurrency, name, round(runs[name][concurrency][-1]["tokens_per_second"], 1), flush=True)
    medians = {
        name: {
            str(c): {key: round(statistics.median(run[key] for run in repeats), 3) for key in repeats[0]}
            for c, repeats in by.items()
        }
        for name, by in runs.items()
    }
    largest = max(arguments.concurrency)
    inside = {name: inside_forward(engine, prompts[:largest], params) for name, engine in engines.items()}
    settings = {"max_tokens": arguments.max_tokens, "temperature": arguments.temperature, "top_p": arguments.top_p}
    write_result(arguments.output, {**settings, "medians": medians, "operators": inside, "runs": runs})


if __name__ == "__main__":
    main()
