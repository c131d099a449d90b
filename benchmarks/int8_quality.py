"""How far int8 moves the model: KL divergence of next-token distributions against float32 on real prompts.

    python benchmarks/int8_quality.py --prompts PROMPTS_DIR

PROMPTS_DIR holds NAME.jsonl files with a "turns" list a line. Both models read the same prompts, teacher-forced.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from provenance import write_result

from trimtab.models.executor import ForwardBatch, ModelExecutor
from trimtab.models.loader import load_model

BLOCK_SIZE = 32


def prompt_ids(path: Path, tokenizer: object, count: int, max_tokens: int) -> list[list[int]]:
    prompts = [json.loads(line)["turns"][0] for line in path.read_text().splitlines()[:count]]
    render = tokenizer.apply_chat_template  # type: ignore[attr-defined]
    texts = [render([{"role": "user", "content": p}], tokenize=False, add_generation_prompt=True) for p in prompts]
    return [tokenizer(text).input_ids[:max_tokens] for text in texts]  # type: ignore[operator]


def log_probs(executor: ModelExecutor, ids: list[int]) -> torch.Tensor:
    blocks = list(range(-(-len(ids) // BLOCK_SIZE)))
    batch = ForwardBatch(torch.tensor(ids), [len(ids)], [0], [blocks], torch.arange(len(ids)))
    return executor.forward(batch).logits.log_softmax(-1)


def compare(reference: ModelExecutor, other: ModelExecutor, prompts: list[list[int]]) -> dict[str, float]:
    divergences, agreements = [], []
    for ids in prompts:
        expected, actual = log_probs(reference, ids), log_probs(other, ids)
        divergences.append((expected.exp() * (expected - actual)).sum(-1))
        agreements.append((expected.argmax(-1) == actual.argmax(-1)).float())
    kl, same = torch.cat(divergences), torch.cat(agreements)
    return {
        "tokens": len(kl),
        "kl_mean": round(float(kl.mean()), 4),
        "kl_median": round(float(kl.median()), 4),
        "kl_p99": round(float(kl.quantile(0.99)), 3),
        "kl_max": round(float(kl.max()), 3),
        "same_argmax": round(float(same.mean()), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompts", type=Path, required=True, help="folder of NAME.jsonl files")
    parser.add_argument("--sets", nargs="+", default=["gsm8k", "humaneval", "mt_bench", "creative_arena_v2"])
    parser.add_argument("--count", type=int, default=20, help="prompts per set")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/int8_quality.json"))
    arguments = parser.parse_args()
    blocks = -(-arguments.max_tokens // BLOCK_SIZE)
    reference, int8 = (
        ModelExecutor(load_model(arguments.model, dtype=dtype), blocks, BLOCK_SIZE) for dtype in ("float32", "int8")
    )
    result = {}
    for name in arguments.sets:
        path = arguments.prompts / f"{name}.jsonl"
        ids = prompt_ids(path, reference.loaded.tokenizer, arguments.count, arguments.max_tokens)
        result[name] = compare(reference, int8, ids)
        print(name, result[name], flush=True)
    write_result(arguments.out, {"model": arguments.model, "sets": result})


if __name__ == "__main__":
    main()
