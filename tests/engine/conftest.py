"""Tiny models and short ways to run an engine on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from tests.tiny import save_tiny_model
from trimtab.engine.config import EngineConfig
from trimtab.engine.engine import Engine
from trimtab.engine.request import TokenLogprob
from trimtab.engine.sampling_params import SamplingParams
from trimtab.policy import CostModel


@dataclass
class Output:
    """Everything one completion gave."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None
    num_steps: int = 0


@pytest.fixture(scope="session")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("target"), scale=5.0)


@pytest.fixture(scope="session")
def draft_dir(tmp_path_factory: pytest.TempPathFactory, target_dir: str) -> str:
    """The target with noise on its weights: agrees often, not always."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory = tmp_path_factory.mktemp("draft")
    model = AutoModelForCausalLM.from_pretrained(target_dir)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.04 * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(target_dir).save_pretrained(directory)
    return str(directory)


@pytest.fixture(scope="session")
def speculative(draft_dir: str) -> dict[str, dict[str, Any]]:
    """Settings of each drafter that needs no training."""
    return {
        "ngram": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1},
        "draft_model": {"method": "draft_model", "model": draft_dir, "num_speculative_tokens": 4},
        "greedy draft_model": {
            "method": "draft_model",
            "model": draft_dir,
            "num_speculative_tokens": 3,
            "draft_sample_method": "greedy",
        },
    }


MakeEngine = Callable[..., Engine]


@pytest.fixture(scope="session")
def make_engine(target_dir: str, tmp_path_factory: pytest.TempPathFactory) -> MakeEngine:
    profiles = str(tmp_path_factory.mktemp("profiles"))

    def make(speculative_config: dict[str, Any] | None = None, **settings: Any) -> Engine:
        settings = {
            "model": target_dir,
            "dtype": "float32",
            "max_model_len": 128,
            "block_size": 8,
            "state_dir": profiles,
        } | settings
        engine = Engine(EngineConfig(speculative_config=speculative_config, **settings))
        if engine.speculation is not None:  # steep enough that trimming pays, and the same on every machine
            fix_cost(engine, CostModel.constant(1.0, 0.1))
        return engine

    return make


def fix_cost(engine: Engine, cost: CostModel) -> None:
    """Give an engine a cost model that measured times do not move."""
    assert engine.speculation is not None
    engine.speculation.cost = cost
    cost.observe = cost.observe_draft = lambda *_: None  # type: ignore[method-assign]


def prompts(count: int, seed: int = 0, low: int = 3, high: int = 30) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(low, high, (count,), generator=generator).tolist()
    return [torch.randint(4, 64, (length,), generator=generator).tolist() for length in lengths]


def run(
    engine: Engine,
    requests: Sequence[tuple[list[int], SamplingParams]],
    on_step: Callable[[Engine], None] | None = None,
) -> list[Output]:
    """Serve all requests at once; outputs in order (of n completions, the first)."""
    outputs = {str(index): Output() for index in range(len(requests))}
    for index, (tokens, params) in enumerate(requests):
        engine.add_request(str(index), tokens, params)
    for _ in range(5000):
        if not engine.has_unfinished:
            break
        for output in engine.step():
            if output.index == 0:
                into = outputs[output.request_id]
                into.token_ids += output.token_ids
                into.text += output.text
                into.logprobs += output.logprobs or []
                into.finish_reason, into.error = output.finish_reason, output.error
                into.num_steps += 1
        if on_step is not None:
            on_step(engine)
    assert not engine.has_unfinished, "no progress"
    assert engine.scheduler.pool.num_owned == 0
    return list(outputs.values())
