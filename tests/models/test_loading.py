"""Preparing a model changes how it is computed, not what; a kept copy is the same model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.tiny import save_tiny_model
from trimtab.models.executor import ForwardBatch, ModelExecutor
from trimtab.models.loader import load_model, resolve_model
from trimtab.models.quantization import Int8Linear, scales_by_weight, smooth


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def logits_of(directory: str) -> torch.Tensor:
    executor = ModelExecutor(load_model(directory, dtype="int8"), 4, 16)
    return executor.forward(ForwardBatch(torch.arange(3, 30), [27], [0], [[0, 1]], torch.arange(27))).logits


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_the_second_load_reads_the_prepared_copy_and_is_the_same_model(
    tmp_path: Path, own_cache: Path, family: str
) -> None:
    directory = save_tiny_model(tmp_path / "model", family)
    first = logits_of(directory)
    (kept,) = (own_cache / "int8").glob("*.safetensors")
    written = kept.stat().st_mtime_ns
    torch.testing.assert_close(logits_of(directory), first, rtol=0, atol=0)
    assert kept.stat().st_mtime_ns == written


def test_a_changed_checkpoint_is_prepared_anew(tmp_path: Path, own_cache: Path) -> None:
    directory = save_tiny_model(tmp_path / "model", seed=0)
    first = logits_of(directory)
    save_tiny_model(tmp_path / "model", seed=1)
    assert not torch.equal(logits_of(directory), first)
    assert len(list((own_cache / "int8").glob("*.safetensors"))) == 2


def test_smoothing_leaves_the_function_alone(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(save_tiny_model(tmp_path), dtype=torch.float32)
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        before = model(ids).logits
        norm_before = model.model.layers[0].input_layernorm.weight.clone()
        smooth(model.base_model, lambda: model.base_model(ids, use_cache=False))
        after = model(ids).logits
    assert not torch.equal(norm_before, model.model.layers[0].input_layernorm.weight)
    torch.testing.assert_close(after, before, rtol=1e-3, atol=1e-3)


def test_a_norm_that_adds_one_to_its_weight_is_recognised() -> None:
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    assert scales_by_weight(LlamaRMSNorm(8), 8)
    assert not scales_by_weight(GemmaRMSNorm(8), 8)


def test_int8_products_are_close_for_every_row_scale() -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(24, 64) * 0.1, torch.randn(24)
    rows = torch.randn(9, 64) * torch.logspace(-4, 4, 9)[:, None]
    layer = Int8Linear(weight, bias)
    expected = rows @ weight.T
    error = (Int8Linear(weight)(rows) - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert error.median() < 0.02
    assert error.max() < 0.1  # two extreme neighbours may saturate a 16-bit sum
    again = Int8Linear.from_tensors(**layer.tensors())
    torch.testing.assert_close(again(rows), layer(rows), rtol=0, atol=0)


def test_int8_of_a_zero_row_is_the_bias_and_of_a_nan_row_is_nan() -> None:
    layer = Int8Linear(torch.randn(4, 8), torch.arange(4.0))
    torch.testing.assert_close(layer(torch.zeros(1, 8))[0], torch.arange(4.0))
    rows = torch.ones(2, 8)
    clean = layer(rows)[1]
    rows[0, 3] = float("nan")
    assert layer(rows)[0].isnan().all()
    torch.testing.assert_close(layer(rows)[1], clean)


@pytest.mark.model
@pytest.mark.slow
def test_the_embedded_model_is_found_in_its_wheel_and_predicts_paris(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRIMTAB_CACHE")  # the converted copy is shared with the other tests
    assert resolve_model("smollm2").endswith("SmolLM2-135M-Instruct.Q4_1.gguf")
    loaded = load_model("smollm2")
    assert loaded.dtype == "int8"
    ids = loaded.tokenizer("The capital of France is").input_ids
    executor = ModelExecutor(loaded, 2, 16)
    output = executor.forward(ForwardBatch(torch.tensor(ids), [len(ids)], [0], [[0]], torch.tensor([len(ids) - 1])))
    assert loaded.tokenizer.decode([int(output.logits.argmax())]).strip() == "Paris"
