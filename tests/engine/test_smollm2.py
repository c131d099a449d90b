"""The same promises on the embedded SmolLM2 with real prompts."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from tests.engine.conftest import run
from trimtab.engine.config import EngineConfig
from trimtab.engine.engine import Engine
from trimtab.engine.sampling_params import SamplingParams
from trimtab.models.loader import load_model

pytestmark = [pytest.mark.model, pytest.mark.slow]

NEAR_TIE = 1e-3
NUM_DRAWS = int(os.environ.get("TRIMTAB_TEST_DRAWS", "4000"))  # 20,000 take ten minutes of one core
TEXTS = (
    "James decides to run 3 sprints 3 times a week. He runs 60 meters each sprint. How many meters does he run a week?",
    "Write a Python function that returns the n-th Fibonacci number, then one that returns the first n of them.",
    "Name the planets of the solar system in order, one per line.",
    "Translate to French: the weather is nice today, the weather was nice yesterday.",
    "Repeat this list twice: apple, banana, cherry, date, elderberry.",
    "Tell a short story about a robot who lives by the sea.",
    "What is the capital of Italy, and what is the capital of France?",
    "Explain photosynthesis to a child.",
)


@pytest.fixture(scope="module")
def plain() -> Engine:
    return Engine(EngineConfig(model="smollm2", dtype="float32", max_model_len=512))


@pytest.fixture(scope="module")
def prompts(plain: Engine) -> list[list[int]]:
    tokenizer = plain.tokenizer
    rendered = [
        tokenizer.apply_chat_template([{"role": "user", "content": t}], tokenize=False, add_generation_prompt=True)
        for t in TEXTS
    ]
    return [list(tokenizer(text, add_special_tokens=False).input_ids) for text in rendered]


@pytest.mark.parametrize("planner", ["fixed", "lookahead"])
def test_greedy_output_is_that_of_plain_decoding_up_to_near_ties(
    plain: Engine, prompts: list[list[int]], planner: str
) -> None:
    params = SamplingParams(temperature=0, max_tokens=32, logprobs=2)
    expected = run(plain, [(prompt, params) for prompt in prompts])
    engine = Engine(
        EngineConfig(
            model="smollm2",
            dtype="float32",
            max_model_len=512,
            num_kv_blocks=16,
            speculative_config={"method": "ngram", "prompt_lookup_min": 1, "planner": planner},
        )
    )
    found = run(engine, [(prompt, params) for prompt in prompts])
    for one, other in zip(expected, found, strict=True):
        for entry, token in zip(one.logprobs, other.token_ids, strict=False):
            if entry.token_id != token:
                assert entry.top[0][1] - entry.top[1][1] < NEAR_TIE
                break
    stats = engine.stats()
    assert stats.num_accepted > 0
    assert stats.num_preemptions > 0


@pytest.mark.timeout(600)
def test_speculated_tokens_follow_the_distribution_of_transformers(plain: Engine) -> None:
    """Chi-square of the token after a draft that is sometimes right.

    The prompt repeats itself, so that a look-up often drafts; the second token of each output is an accepted draft,
    what was drawn instead of a rejected one, or plain. Whole blocks of the prompt are computed once.
    """
    tokenizer = plain.tokenizer
    prompt = list(tokenizer("red, blue, green, " * 6).input_ids)[:33]  # four blocks and one token
    params = SamplingParams(temperature=1.3, top_p=0.9, max_tokens=3)
    engine = Engine(
        EngineConfig(
            model="smollm2",
            dtype="float32",
            max_model_len=64,
            block_size=8,
            max_num_seqs=250,
            max_num_batched_tokens=4096,
            speculative_config={
                "method": "ngram",
                "num_speculative_tokens": 1,
                "prompt_lookup_min": 1,
                "planner": "fixed",
            },
        )
    )
    run(engine, [(prompt, params)])
    first: dict[int, int] = {}
    second: dict[int, dict[int, int]] = {}
    for start in range(0, NUM_DRAWS, 1000):
        for output in run(engine, [(prompt, replace(params, seed=start + i)) for i in range(1000)]):
            tokens = output.token_ids
            first[tokens[0]] = first.get(tokens[0], 0) + 1
            if len(tokens) > 1:
                row = second.setdefault(tokens[0], {})
                row[tokens[1]] = row.get(tokens[1], 0) + 1
    stats = engine.stats()
    assert stats.num_verified > NUM_DRAWS / 4
    assert 0.1 < stats.num_accepted / stats.num_verified < 0.98
    from transformers import TemperatureLogitsWarper, TopPLogitsWarper

    model = load_model("smollm2", "float32").model  # not given to an executor: attention is transformers' own

    def law(tokens: list[int]) -> np.ndarray:
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[:, -1]
        scores = TopPLogitsWarper(0.9)(None, TemperatureLogitsWarper(1.3)(None, logits))
        return scores.softmax(-1)[0].double().numpy()

    def p_value(found: dict[int, int], probs: np.ndarray) -> float:
        total = sum(found.values())
        common = np.flatnonzero(total * probs >= 5)
        observed = [found.get(int(token), 0) for token in common]
        expected = list(total * probs[common])
        rest = total - sum(expected)
        if rest > 1e-6:
            observed, expected = [*observed, total - sum(observed)], [*expected, rest]
        else:
            assert sum(observed) == total
        return float(chisquare(observed, np.array(expected) * total / sum(expected)).pvalue)

    assert p_value(first, law(prompt)) > 1e-4
    most = max(second, key=lambda token: sum(second[token].values()))
    assert sum(second[most].values()) > NUM_DRAWS / 20
    assert p_value(second[most], law([*prompt, most])) > 1e-4
