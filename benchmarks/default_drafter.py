"""Whether a drafter pays: plain decoding, prompt lookup and the shipped DSpark drafter in turn, in one process.

python benchmarks/default_drafter.py --prompts PROMPTS_DIR
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from provenance import write_result

from trimtab import LLM, SamplingParams

ARMS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": 4},
    "dspark": {"method": "dspark"},
}
SETS = ("gsm8k", "humaneval", "mt_bench", "creative_arena_v2")


def measure(llm: LLM, prompts: list[str], concurrency: int, max_tokens: int) -> tuple[float, float]:
    """Tokens per second and acceptance length over all prompts, so many at a time."""
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    before, start = llm.engine.stats(), time.perf_counter()
    for first in range(0, len(chats), concurrency):
        llm.chat(chats[first : first + concurrency], params)
    seconds, after = time.perf_counter() - start, llm.engine.stats()
    steps = after.num_decode_steps - before.num_decode_steps
    rate = (after.num_generated_tokens - before.num_generated_tokens) / seconds
    return rate, 1 + (after.num_accepted - before.num_accepted) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True, help="folder of NAME.jsonl files")
    parser.add_argument("--count", type=int, default=2, help="prompts per set")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", default="default_drafter.json")
    arguments = parser.parse_args()
    files = [arguments.prompts / f"{name}.jsonl" for name in SETS]
    prompts = [json.loads(x)["turns"][0][:600] for f in files for x in f.read_text().splitlines()[: arguments.count]]
    options: dict[str, Any] = {"num_threads": 1, "max_model_len": 1024, "kv_cache_memory_gb": 0.3}
    arms = {name: LLM("smollm2", speculative_config=settings, **options) for name, settings in ARMS.items()}
    result: dict[str, Any] = {"prompts": len(prompts), "max_tokens": arguments.max_tokens, "threads": 1, "greedy": True}
    for concurrency in (1, 8):
        runs: dict[str, list[tuple[float, float]]] = {name: [] for name in arms}
        for _ in range(arguments.rounds + 1):
            for name, llm in arms.items():
                runs[name].append(measure(llm, prompts, concurrency, arguments.max_tokens))
        kept = {name: values[1:] for name, values in runs.items()}  # the first round warms up
        result[f"concurrency {concurrency}"] = {
            name: {
                "tokens_per_second": round(statistics.median(rate for rate, _ in values), 1),
                "ratio_to_plain": round(
                    statistics.median(a / b for (a, _), (b, _) in zip(values, kept["plain"], strict=True)), 3
                ),
                "acceptance_length": round(statistics.median(length for _, length in values), 2),
            }
            for name, values in kept.items()
        }
        print(result[f"concurrency {concurrency}"], flush=True)
    write_result(arguments.out, result)


if __name__ == "__main__":
    main()
