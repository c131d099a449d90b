"""Greedy output with speculation against plain greedy, token for token, on real prompts.

Every drafter x planner, batch 1 and 16, with a cache so small that requests are preempted. Where two outputs part, the
target's margin between the two tokens is computed: a part at a margin near 0 is a near-tie of the numerics, anything
else is an error, and the script fails.

Run: python benchmarks/greedy_equality.py --prompts FILE.jsonl ... [--count 100] [--drafter JSON ...]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from provenance import write_result

from trimtab.engine.config import EngineConfig
from trimtab.engine.engine import Engine
from trimtab.engine.sampling_params import SamplingParams
from trimtab.policy import planner_names

NEAR_TIE = 1e-3
DRAFTERS = ('{"method": "ngram"}', '{"method": "dspark"}', '{"method": "eagle3"}')


def read_prompts(paths: Sequence[Path], tokenizer: Any, count: int) -> list[list[int]]:
    """Chat prompts, as many from each file."""
    per_file = [[json.loads(line)["turns"][0] for line in path.open() if line.strip()] for path in paths]
    texts = [text for texts in zip(*per_file, strict=False) for text in texts][:count]
    rendered = [
        tokenizer.apply_chat_template([{"role": "user", "content": t}], tokenize=False, add_generation_prompt=True)
        for t in texts
    ]
    return [list(tokenizer(text, add_special_tokens=False).input_ids) for text in rendered]


def generate(engine: Engine, prompts: Sequence[list[int]], params: SamplingParams, batch: int) -> list[list[int]]:
    """Outputs in order, at most ``batch`` requests at a time."""
    outputs: list[list[int]] = [[] for _ in prompts]
    waiting = list(enumerate(prompts))[::-1]
    running = 0
    while waiting or engine.has_unfinished:
        while waiting and running < batch:
            index, prompt = waiting.pop()
            engine.add_request(str(index), prompt, params)
            running += 1
        for output in engine.step():
            outputs[int(output.request_id)] += output.token_ids
            running -= output.finished
    return outputs


def differences(
    engine: Engine, prompts: Sequence[list[int]], plain: Sequence[list[int]], found: Sequence[list[int]]
) -> list[dict[str, Any]]:
    """Where outputs part, with the margin of plain decoding's token over the other one."""
    parts = []
    for index, (prompt, expected, tokens) in enumerate(zip(prompts, plain, found, strict=True)):
        if expected == tokens:
            continue
        at = next((i for i, pair in enumerate(zip(expected, tokens, strict=False)) if pair[0] != pair[1]), -1)
        margin = float("inf")
        if at >= 0:
            params = SamplingParams(temperature=0, max_tokens=1, logprobs=20)
            engine.add_request("probe", prompt + expected[:at], params)
            while engine.has_unfinished:
                for output in engine.step():
                    scores = dict(output.logprobs[0].top) if output.logprobs else {}
            margin = abs(scores.get(expected[at], -1e9) - scores.get(tokens[at], 1e9))
        parts.append({"prompt": index, "position": at, "margin": margin})
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompts", type=Path, nargs="+", required=True)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--planners", nargs="+", default=planner_names())
    parser.add_argument("--drafter", action="append", help="speculative config as JSON; may be given again")
    parser.add_argument("--output", default="greedy_equality.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    params = SamplingParams(temperature=0, max_tokens=arguments.max_tokens)

    def make(speculative: dict[str, Any] | None, **settings: Any) -> Engine:
        settings = {"dtype": "float32", "max_model_len": 1024, "num_threads": 1} | settings
        return Engine(EngineConfig(model=arguments.model, speculative_config=speculative, **settings))

    reference = make(None)
    prompts = [p for p in read_prompts(arguments.prompts, reference.tokenizer, arguments.count) if len(p) < 900]
    plain = generate(reference, prompts, params, 16)
    rows = []
    for text in arguments.drafter or DRAFTERS:
        for planner in arguments.planners:
            # 16 requests do not fit into 1,280 cached tokens at once: some are preempted
            engine = make(json.loads(text) | {"planner": planner}, num_kv_blocks=40, enable_prefix_caching=False)
            for batch in arguments.batches:
                start, before = time.perf_counter(), engine.stats()
                found = generate(engine, prompts, params, batch)
                stats = engine.stats()
                parts = differences(reference, prompts, plain, found)
                rows.append(
                    {
                        "speculative": json.loads(text),
                        "planner": planner,
                        "batch": batch,
                        "num_prompts": len(prompts),
                        "num_equal": len(prompts) - len(parts),
                        "near_ties": [part for part in parts if part["margin"] <= NEAR_TIE],
                        "errors": [part for part in parts if part["margin"] > NEAR_TIE],
                        "num_drafted": stats.num_drafted - before.num_drafted,
                        "num_verified": stats.num_verified - before.num_verified,
                        "num_accepted": stats.num_accepted - before.num_accepted,
                        "num_preemptions": stats.num_preemptions - before.num_preemptions,
                        "fallbacks": stats.fallbacks_by_reason,
                        "seconds": round(time.perf_counter() - start, 1),
                    }
                )
                print(json.dumps(rows[-1]), flush=True)
    write_result(arguments.output, {"max_tokens": arguments.max_tokens, "runs": rows})
    if any(row["errors"] or not row["num_verified"] for row in rows):
        sys.exit("outputs differ by more than a near-tie, or nothing was verified")


if __name__ == "__main__":
    main()
