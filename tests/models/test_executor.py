"""The executor computes what transformers computes, however a batch is cut into steps and blocks."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiny import save_tiny_model
from trimtab.models.attention import AttentionMetadata, group_requests
from trimtab.models.executor import ForwardBatch, ModelExecutor
from trimtab.models.kv_cache import KVCache
from trimtab.models.loader import ModelLoadError, load_model

BLOCK_SIZE = 4


def reference_hidden(directory: str, tokens: list[int]) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        output = model(torch.tensor([tokens]), output_hidden_states=True)
    return output.logits[0], tuple(hidden[0] for hidden in output.hidden_states)


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3", "mistral", "gemma"])
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    overrides = {"sliding_window": None} if request.param == "mistral" else {}
    return save_tiny_model(tmp_path_factory.mktemp(request.param), request.param, scale=2.0, **overrides)


def test_ragged_chunked_steps_give_the_logits_and_hidden_states_of_transformers(model_dir: str) -> None:
    executor = ModelExecutor(load_model(model_dir, dtype="float32"), 64, BLOCK_SIZE, taps=(0, 1))
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 64) for _ in range(length)] for length in (41, 3, 17, 60)]
    free = list(range(64))
    rng.shuffle(free)
    tables = [[free.pop() for _ in range(-(-len(prompt) // BLOCK_SIZE))] for prompt in prompts]
    done = [0] * len(prompts)
    logits: list[list[torch.Tensor]] = [[] for _ in prompts]
    features: list[list[torch.Tensor]] = [[] for _ in prompts]
    while any(count < len(prompt) for count, prompt in zip(done, prompts, strict=True)):
        active = [r for r in range(len(prompts)) if done[r] < len(prompts[r]) and rng.random() < 0.8]
        if not active:
            continue
        lens = [min(len(prompts[r]) - done[r], rng.choice([1, 2, 5, 40])) for r in active]
        ids = [token for r, n in zip(active, lens, strict=True) for token in prompts[r][done[r] : done[r] + n]]
        batch = ForwardBatch(
            torch.tensor(ids), lens, [done[r] for r in active], [tables[r] for r in active], torch.arange(len(ids))
        )
        output = executor.forward(batch)
        assert output.features is not None
        for r, n, rows, taps in zip(active, lens, output.logits.split(lens), output.features.split(lens), strict=True):
            logits[r].append(rows)
            features[r].append(taps)
            done[r] += n
    for prompt, rows, taps in zip(prompts, logits, features, strict=True):
        expected_logits, hidden = reference_hidden(model_dir, prompt)
        torch.testing.assert_close(torch.cat(rows), expected_logits, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(torch.cat(taps), torch.cat([hidden[0], hidden[1]], dim=-1), rtol=1e-4, atol=1e-4)


def test_int8_keeps_the_ranking_of_float32(model_dir: str) -> None:
    tokens = list(range(3, 43))
    executor = ModelExecutor(load_model(model_dir, dtype="int8"), 16, BLOCK_SIZE)
    output = executor.forward(ForwardBatch(torch.tensor(tokens), [40], [0], [list(range(10))], torch.arange(40)))
    expected, _ = reference_hidden(model_dir, tokens)
    divergence = (expected.softmax(-1) * (expected.log_softmax(-1) - output.logits.log_softmax(-1))).sum(-1)
    assert divergence.mean() < 0.05
    assert (expected.argmax(-1) == output.logits.argmax(-1)).float().mean() > 0.85


def test_int8_rows_do_not_depend_on_their_neighbours(model_dir: str) -> None:
    executor = ModelExecutor(load_model(model_dir, dtype="int8"), 16, BLOCK_SIZE)
    alone = executor.forward(ForwardBatch(torch.tensor([5, 6, 7]), [3], [0], [[0]], torch.tensor([2]))).logits
    both = executor.forward(
        ForwardBatch(torch.tensor([5, 6, 7, 50, 51, 52, 53]), [3, 4], [0, 0], [[1], [2]], torch.tensor([2, 6]))
    ).logits
    torch.testing.assert_close(both[0], alone[0], rtol=1e-4, atol=1e-4)


def test_nan_in_one_request_stays_in_that_request(tmp_path: Path) -> None:
    executor = ModelExecutor(load_model(save_tiny_model(tmp_path), dtype="float32"), 16, BLOCK_SIZE)
    rows = torch.tensor([0, 1, 2])

    def step(context: int) -> torch.Tensor:
        batch = ForwardBatch(torch.tensor([5, 6, 7]), [1, 1, 1], [context, 2, 9], [[0, 5, 6], [1], [2, 3, 4]], rows)
        return executor.forward(batch).logits

    clean = step(9)
    executor.cache.layer(0).keys[0] = float("nan")
    executor.cache.layer(0).values[0] = float("nan")
    poisoned = step(9)
    assert poisoned[0].isnan().all()
    torch.testing.assert_close(poisoned[1:], clean[1:])
    executor.cache.clear([0])
    assert not step(9).isnan().any()


@pytest.mark.parametrize(
    ("family", "overrides", "message"),
    [
        ("mistral", {"sliding_window": 64}, "--max-model-len 64"),
        ("gemma2", {"sliding_window": 64}, "sliding window of 64"),
        ("mamba", {}, "no attention heads"),
        ("t5", {}, "encoder-decoder"),
    ],
)
def test_unsupported_attention_is_refused_by_name(
    tmp_path: Path, family: str, overrides: dict[str, int], message: str
) -> None:
    from transformers import AutoConfig

    AutoConfig.for_model(family, **overrides).save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match=message):
        load_model(str(tmp_path))


def test_a_window_that_never_slides_is_accepted(tmp_path: Path) -> None:
    directory = save_tiny_model(tmp_path, "mistral", sliding_window=64)
    assert load_model(directory, dtype="float32", max_model_len=64).dtype == "float32"


def test_bad_names_and_types_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="does not exist"):
        load_model(str(tmp_path / "missing"))
    with pytest.raises(ModelLoadError, match=r'unknown dtype "int3"'):
        load_model(str(tmp_path), dtype="int3")
    with pytest.raises(ModelLoadError, match="can not be loaded"):
        load_model(str(tmp_path))


def test_taps_outside_the_model_are_refused(tmp_path: Path) -> None:
    loaded = load_model(save_tiny_model(tmp_path), dtype="float32")
    with pytest.raises(ValueError, match=r"\[9\] are outside 0\.\.2"):
        ModelExecutor(loaded, 4, BLOCK_SIZE, taps=(1, 9))


def test_a_block_table_that_is_too_short_is_refused() -> None:
    with pytest.raises(ValueError, match="2 blocks of 4 can not hold 7 cached \\+ 2 new"):
        AttentionMetadata.build([2], [7], [[0, 1]], 4)


def test_an_empty_cache_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one block"):
        KVCache(1, 0, 4, 1, 8)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 100), st.integers(0, 3000)), min_size=1, max_size=40))
def test_every_request_is_in_exactly_one_group(shapes: list[tuple[int, int]]) -> None:
    groups = group_requests([q for q, _ in shapes], [c for _, c in shapes])
    assert sorted(r for group in groups for r in group) == list(range(len(shapes)))
    for group in groups:
        totals = [sum(shapes[r]) for r in group]
        assert max(totals) <= 2 * max(min(totals), 128)
