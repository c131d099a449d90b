"""Checkpoints that do not fit are refused with both values named; MTP modules are found inside target checkpoints."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.drafters import layouts
from tests.drafters.layouts import EPS, H, L, V, layer_shapes, weights
from tests.drafters.reference import Target, draft_logits
from tests.drafters.test_forward import Conversation, Scripted, assert_agree, settings
from tests.tiny import save_tiny_model
from trimtab.drafters import make_drafter, methods
from trimtab.drafters.formats import CheckpointError
from trimtab.models.executor import ModelExecutor
from trimtab.models.loader import load_model


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> ModelExecutor:
    directory = save_tiny_model(tmp_path_factory.mktemp("target"), num_hidden_layers=L)
    return ModelExecutor(load_model(directory, "float32"), num_blocks=12, block_size=8)


def changed(layout: layouts.Layout, **config: Any) -> layouts.Layout:
    return replace(layout, config={**layout.config, **config})


def refusal(layout: layouts.Layout, target: ModelExecutor, tmp_path: Path, **options: Any) -> str:
    with pytest.raises(CheckpointError) as error:
        make_drafter(settings(layout.save(tmp_path / "drafter"), **options), target)
    return str(error.value)


def test_another_hidden_size_is_refused(target: ModelExecutor, tmp_path: Path) -> None:
    layout = layouts.eagle3_speculators()
    wide = replace(layout, tensors=layout.tensors | {"fc.weight": torch.zeros(H, 3 * 40)})
    message = refusal(wide, target, tmp_path)
    assert "120" in message
    assert "96" in message


def test_another_vocabulary_is_refused(target: ModelExecutor, tmp_path: Path) -> None:
    layers = {**layouts.LAYER_CONFIG, "vocab_size": 80}
    message = refusal(changed(layouts.eagle3_speculators(), transformer_layer_config=layers), target, tmp_path)
    assert "80" in message
    assert "64" in message


def test_another_layer_count_is_refused(target: ModelExecutor, tmp_path: Path) -> None:
    message = refusal(changed(layouts.dflash_zlab(), num_target_layers=36), target, tmp_path)
    assert "36" in message
    assert "6 layers" in message


def test_taps_outside_the_target_are_refused(target: ModelExecutor, tmp_path: Path) -> None:
    message = refusal(
        changed(layouts.eagle3_speculators(), eagle_aux_hidden_state_layer_ids=[1, 3, 30]), target, tmp_path
    )
    assert "30" in message
    assert "0 to 6" in message


def test_lossy_verification_needs_an_explicit_flag(target: ModelExecutor, tmp_path: Path) -> None:
    layout = layouts.eagle3_speculators()
    config = layouts.speculators("eagle3", accept_k=5)["speculators_config"]
    lossy = changed(layout, speculators_config=config)
    message = refusal(lossy, target, tmp_path)
    assert "verifier_accept_k 5" in message
    assert "allow_lossy" in message
    assert make_drafter(settings(str(tmp_path / "drafter"), allow_lossy=True), target).name == "eagle3"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"norm.weight": None}, "missing"),
        ({"layers.0.extra.weight": torch.zeros(2)}, "unknown"),
        ({"norm.weight": torch.ones(H + 1)}, "norm.weight is [33], not [32]"),
        ({"d2t": None}, "without d2t"),
        ({"d2t": torch.zeros(32, dtype=torch.int64), "t2d": torch.ones(V, dtype=torch.bool)}, "t2d and d2t"),
        ({"d2t": -torch.arange(32)}, "target id of its own"),
    ],
)
def test_wrong_tensors_are_named(change: Any, expected: str, target: ModelExecutor, tmp_path: Path) -> None:
    layout = layouts.eagle3_speculators()
    tensors = {name: tensor for name, tensor in (layout.tensors | change).items() if tensor is not None}
    assert expected in refusal(replace(layout, tensors=tensors), target, tmp_path)


def test_an_unknown_format_is_refused(target: ModelExecutor, tmp_path: Path) -> None:
    layout = replace(layouts.mtp_speculators(), config={"architectures": ["Mystery"]}, tensors={"a": torch.zeros(1)})
    assert "Mystery" in refusal(layout, target, tmp_path)


def test_the_method_must_be_the_checkpoints(target: ModelExecutor, tmp_path: Path) -> None:
    message = refusal(layouts.dflash_zlab(), target, tmp_path, method="eagle3")
    assert '"dflash"' in message
    assert '"eagle3"' in message


def test_more_positions_than_a_block_holds_are_refused(target: ModelExecutor, tmp_path: Path) -> None:
    message = refusal(layouts.dflash_zlab(), target, tmp_path, num_speculative_tokens=4)
    assert "4" in message
    assert "3" in message


def test_a_missing_drafter_and_an_unknown_method_are_explained(target: ModelExecutor) -> None:
    with pytest.raises(CheckpointError, match="no directory"):
        make_drafter(settings("./nowhere"), target)
    with pytest.raises(CheckpointError, match="no eagle3 drafter is shipped"):
        make_drafter(settings(method="eagle3"), target)
    with pytest.raises(ValueError, match='did you mean "eagle3"'):
        make_drafter(settings(method="eagel3"), target)
    assert {"ngram", "draft_model", "eagle", "eagle3", "mtp", "dflash", "dspark"} <= set(methods())


# MTP inside a target checkpoint

PARTS = {"enorm": (H,), "hnorm": (H,), "eh_proj": (H, 2 * H), "norm": (H,)}
PUBLISHED = {
    "deepseek": (f"model.layers.{L}.", ("enorm", "hnorm", "eh_proj", "shared_head.norm"), ""),
    "mimo": ("model.mtp_layers.0.", ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"), ""),
    "qwen": ("mtp.", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"), "layers.0."),
}


def mtp_tensors(published: str, seed: int = 3) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Tensors as published, and by the reference's names."""
    prefix, names, inner = PUBLISHED[published]
    own = weights(PARTS | layer_shapes("layer."), seed)
    if published == "mimo":  # concatenates the hidden state first
        own["eh_proj"] = torch.cat(own["eh_proj"].chunk(2, 1)[::-1], 1)
    theirs = {f"{prefix}{name}.weight": own[part] for part, name in zip(PARTS, names, strict=True)}
    theirs |= {prefix + inner + name.removeprefix("layer."): t for name, t in own.items() if name.startswith("layer.")}
    if published == "deepseek":
        theirs[prefix + "embed_tokens.weight"] = torch.randn(V, H, generator=torch.Generator().manual_seed(1))
        theirs[prefix + "shared_head.head.weight"] = torch.randn(V, H, generator=torch.Generator().manual_seed(2))
    if published == "mimo":
        own["eh_proj"] = torch.cat(own["eh_proj"].chunk(2, 1)[::-1], 1)
    reference = {f"0.{name}" if name.startswith("layer.") else f"0.{name}.weight": t for name, t in own.items()}
    return theirs, reference


def add_to_target(directory: str, tensors: dict[str, Tensor]) -> None:
    path = Path(directory) / "model.safetensors"
    save_file({**load_file(path), **{n: t.contiguous() for n, t in tensors.items()}}, path, metadata={"format": "pt"})


@pytest.mark.parametrize("published", list(PUBLISHED))
def test_mtp_modules_of_a_target_draft_what_the_reference_does(published: str, tmp_path: Path) -> None:
    directory = save_tiny_model(tmp_path / "target", num_hidden_layers=L, tie_word_embeddings=False, rms_norm_eps=EPS)
    theirs, reference = mtp_tensors(published)
    add_to_target(directory, theirs)
    target = ModelExecutor(load_model(directory, "float32"), num_blocks=12, block_size=8)
    drafter = make_drafter(settings(method="mtp", num_speculative_tokens=3), target)
    if published == "deepseek":
        reference["lm_head.weight"] = theirs[f"model.layers.{L}.shared_head.head.weight"]
        reference["embed_tokens.weight"] = theirs[f"model.layers.{L}.embed_tokens.weight"]
    layout = layouts.Layout(published, "mtp", {}, reference, lambda name: name, (L,))
    talk = Conversation(H)
    drawn = torch.tensor([[5, 6, 7], [9, 10, 11]])
    for spans in ([(0, 7), (0, 12)], [(7, 8), (12, 15)]):
        sampler = Scripted(drawn, 3)
        drafter.propose(talk.batch(spans, [9, 9]), sampler)
        for row in range(2):
            end = spans[row][1]
            known = talk.tokens[row][: end + 1]
            drafts = drawn[row, :2].tolist()
            expected, _ = draft_logits(layout, Target(target.model), talk.features[row][:end], known, drafts)
            for k in range(3):
                assert_agree(sampler.logits[k][row], expected[k])


def test_several_mtp_modules_take_turns(tmp_path: Path) -> None:
    directory = save_tiny_model(tmp_path / "target", num_hidden_layers=L, tie_word_embeddings=False, rms_norm_eps=EPS)
    first, _ = mtp_tensors("deepseek", 3)
    second, _ = mtp_tensors("deepseek", 4)
    add_to_target(directory, first | {name.replace(f".{L}.", f".{L + 1}."): t for name, t in second.items()})
    target = ModelExecutor(load_model(directory, "float32"), num_blocks=12, block_size=8)
    drafter = make_drafter(settings(method="mtp", num_speculative_tokens=4), target)
    one = ModelExecutor(load_model(str(tmp_path / "target"), "float32"), num_blocks=12, block_size=8)
    sampler = Scripted(torch.full((2, 4), 8), 4)
    drafter.propose(Conversation(H).batch([(0, 7), (0, 12)], [9, 9]), sampler)
    assert len(sampler.logits) == 4
    assert all(bool(logits.isfinite().all()) for logits in sampler.logits)
    again = make_drafter(settings(method="mtp", num_speculative_tokens=1), one)
    single = Scripted(torch.full((2, 4), 8), 1)
    again.propose(Conversation(H).batch([(0, 7), (0, 12)], [9, 9]), single)
    torch.testing.assert_close(single.logits[0], sampler.logits[0])


def test_a_target_without_mtp_and_modules_of_experts_are_refused(target: ModelExecutor, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no MTP modules"):
        make_drafter(settings(method="mtp"), target)
    directory = save_tiny_model(tmp_path / "target", num_hidden_layers=L)
    theirs, _ = mtp_tensors("deepseek")
    add_to_target(directory, theirs | {f"model.layers.{L}.mlp.experts.0.up_proj.weight": torch.zeros(4, 4)})
    expert = ModelExecutor(load_model(directory, "float32"), num_blocks=4, block_size=8)
    with pytest.raises(CheckpointError, match="experts"):
        make_drafter(settings(method="mtp"), expert)


def test_int8_targets_get_int8_drafters_close_to_float(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trimtab.drafters.checkpoint.SMALL_LINEAR", 0)
    directory = save_tiny_model(tmp_path / "target", num_hidden_layers=L)
    layout = layouts.dspark("gated", "speculators")
    shown = []
    for dtype in ("float32", "int8"):
        executor = ModelExecutor(load_model(directory, dtype), num_blocks=12, block_size=8)
        drafter = make_drafter(settings(layout.save(tmp_path / "drafter")), executor)
        sampler = Scripted(torch.full((2, 4), 8), 4)
        drafter.propose(Conversation(2 * H).batch([(0, 7), (0, 12)], [9, 9]), sampler)
        shown.append(torch.stack(sampler.logits).log_softmax(-1))
    divergence = (shown[0].exp() * (shown[0] - shown[1])).sum(-1).mean()
    assert 0 < divergence < 0.1


def test_the_config_of_a_hub_checkpoint_without_weights_is_refused(target: ModelExecutor, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(layouts.dflash_zlab().config))
    with pytest.raises(CheckpointError, match="holds no weights"):
        make_drafter(settings(str(tmp_path)), target)
