"""Whatever the drafter, the engine says what the target says: greedy output with and without speculation is equal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.drafters.layouts import ALL, L, Layout
from tests.tiny import save_tiny_model
from trimtab.engine.config import EngineConfig
from trimtab.engine.engine import Engine
from trimtab.engine.sampling_params import SamplingParams

PROMPTS = [[5, 9, 33, 12], [40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50], [7], [20, 21, 20, 21, 20, 21]]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("target"), num_hidden_layers=L, tie_word_embeddings=False)


def generate(target: str, speculative: dict[str, Any] | None, params: SamplingParams) -> tuple[list[list[int]], Any]:
    config = EngineConfig(
        model=target,
        dtype="float32",
        device="cpu",
        block_size=8,
        num_kv_blocks=48,
        max_num_seqs=3,
        speculative_config=speculative,
    )
    engine = Engine(config)
    for index, prompt in enumerate(PROMPTS):
        engine.add_request(str(index), prompt, params)
    tokens: dict[str, list[int]] = {str(index): [] for index in range(len(PROMPTS))}
    while engine.has_unfinished:
        for output in engine.step():
            tokens[output.request_id].extend(output.token_ids)
    stats = engine.stats()
    engine.close()
    return [tokens[str(index)] for index in range(len(PROMPTS))], stats


@pytest.mark.parametrize("layout", ALL, ids=lambda layout: layout.name)
def test_greedy_output_is_the_targets(layout: Layout, target: str, tmp_path: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    plain, _ = generate(target, None, params)
    path = layout.save(tmp_path / "drafter")
    drafted, stats = generate(target, {"model": path, "enable_adaptive_verification": False}, params)
    assert drafted == plain
    assert stats.num_drafted > 0
    assert not any(stats.fallbacks_by_reason.values())


@pytest.mark.parametrize("layout", [ALL[0], ALL[-2]], ids=lambda layout: layout.name)
def test_adaptive_verification_does_not_change_greedy_output(layout: Layout, target: str, tmp_path: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    plain, _ = generate(target, None, params)
    drafted, stats = generate(target, {"model": layout.save(tmp_path / "drafter")}, params)
    assert drafted == plain
    assert stats.num_drafted > 0
