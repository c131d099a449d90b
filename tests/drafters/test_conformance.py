"""`check_drafter` passes our kinds and catches drafters that break a rule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.drafters.layouts import ALL, L, Layout
from tests.drafters.test_forward import settings
from tests.tiny import save_tiny_model
from trimtab.drafters import DraftBatch, DraftSampler, check_drafter, make_drafter
from trimtab.drafters.conformance import ConformanceError
from trimtab.models.executor import ModelExecutor
from trimtab.models.loader import load_model


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> ModelExecutor:
    directory = save_tiny_model(tmp_path_factory.mktemp("target"), num_hidden_layers=L)
    return ModelExecutor(load_model(directory, "float32"), num_blocks=16, block_size=8)


@pytest.mark.parametrize("layout", ALL, ids=lambda layout: layout.name)
def test_every_layout_conforms(layout: Layout, target: ModelExecutor, tmp_path: Path) -> None:
    check_drafter(make_drafter(settings(layout.save(tmp_path / "drafter")), target), target)


def test_prompt_lookup_conforms(target: ModelExecutor) -> None:
    asked = settings(method="ngram", prompt_lookup_min=1, prompt_lookup_max=3)
    check_drafter(make_drafter(asked, target), target)


class Broken:
    """Conforms, unless told otherwise."""

    name, num_positions, taps, vocab_map, autoregressive, max_position = "broken", 2, (1,), None, True, 99

    def __init__(self, **changes: Any) -> None:
        self.leaks = False
        vars(self).update(changes)

    def propose(self, batch: DraftBatch, sampler: DraftSampler) -> None:
        last = torch.tensor(batch.num_new).cumsum(0) - 1
        assert batch.features is not None
        state = batch.features[last]
        if self.leaks:
            state = state.mean(0, keepdim=True).expand(len(state), -1)
        state = state[batch.drafting].repeat(1, 2)
        for k in range(min(sampler.depth, self.num_positions) if batch.drafting else 0):
            sampler.sample(state, k)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"leaks": True}, "depends on the other requests"),
        ({"taps": (9,)}, "outside the target"),
        ({"num_positions": 0}, "num_positions is 0"),
        ({"vocab_map": torch.tensor([1, 1])}, "twice"),
        ({"vocab_map": torch.arange(10)}, "expected"),
    ],
)
def test_broken_drafters_are_caught(changes: Any, problem: str, target: ModelExecutor) -> None:
    check_drafter(Broken(), target)
    with pytest.raises(ConformanceError, match=problem):
        check_drafter(Broken(**changes), target)


def test_the_drafter_of_the_how_to_conforms(target: ModelExecutor) -> None:
    page = (Path(__file__).parents[2] / "docs" / "howto" / "drafter.md").read_text()
    code = page.split("```python\n")[1].split("```")[0]
    scope: dict[str, Any] = {}
    exec(compile(code, "drafter.md", "exec"), scope)
    check_drafter(scope["build"](settings(num_speculative_tokens=3), target), target)
