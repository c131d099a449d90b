"""Writes a trained drafter in the speculators format, with a model card beside it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trimtab.drafters.networks import DraftNetwork, DraftShape
from trimtab.policy.confidence import fit_temperature

FORMAT_VERSION = "0.3.0"  # of the speculators configuration that is written
CLASSES = {
    "eagle": "EagleSpeculator",
    "eagle3": "Eagle3Speculator",
    "mtp": "MTPDraftModel",
    "dflash": "DFlashSpeculator",
    "dspark": "DSparkSpeculator",
}
_MTP_NAMES = {
    "enorm": "token_layernorm",
    "hnorm": "hidden_layernorm",
    "eh_proj": "input_proj",
    "norm": "final_layernorm",
}


def export_drafter(
    directory: Path,
    network: DraftNetwork,
    draft_ids: Tensor,
    verifier: str,
    architectures: Sequence[str],
    temperatures: Sequence[float] = (),
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write ``config.json`` and ``model.safetensors``.

    The embedding and the head are the target's and are left out. ``d2t`` holds offsets, ``t2d`` marks the target ids
    that the draft vocabulary has.

    Args:
        draft_ids: ``[draft_vocab_size]`` target id of each draft id, ascending.
        verifier: name of the target; ``architectures``: its classes.
        temperatures: ``[K]`` of the confidence head, if it has one.
    """
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    tensors = {
        exported_name(name): tensor.detach().to(dtype).contiguous()
        for name, tensor in network.state_dict().items()
        if not name.startswith(("embed_tokens.", "lm_head."))
    }
    if network.shape.draft_vocab_size != network.shape.vocab_size:
        tensors["d2t"] = draft_ids.long() - torch.arange(len(draft_ids))
        tensors["t2d"] = torch.zeros(network.shape.vocab_size, dtype=torch.bool)
        tensors["t2d"][draft_ids] = True
    save_file(tensors, str(directory / "model.safetensors"), metadata={"format": "pt"})
    config = speculators_config(network.shape, verifier, architectures)
    if temperatures:
        config["confidence_temperatures"] = [round(float(value), 4) for value in temperatures]
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def exported_name(name: str) -> str:
    """A parameter's name in the speculators format (only MTP's differ from ours)."""
    match = re.match(r"(mtp_layers\.\d+)\.(enorm|hnorm|eh_proj|norm|layer)\.(.*)", name)
    if match is None:
        return name
    prefix, part, rest = match.groups()
    return f"{prefix}.{rest}" if part == "layer" else f"{prefix}.{_MTP_NAMES[part]}.{rest}"


def speculators_config(shape: DraftShape, verifier: str, architectures: Sequence[str]) -> dict[str, Any]:
    """The configuration of a drafter, as the speculators library names it."""
    proposal = {"proposal_type": "greedy", "speculative_tokens": shape.num_positions}
    config: dict[str, Any] = {
        "architectures": [CLASSES[shape.kind]],
        "speculators_model_type": shape.kind,
        "speculators_version": FORMAT_VERSION,
        "speculators_config": {
            "algorithm": shape.kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{**proposal, "verifier_accept_k": 1, "accept_tolerance": 0.0}],
            "verifier": {"name_or_path": verifier, "architectures": list(architectures)},
        },
        "transformer_layer_config": {
            "model_type": "qwen3" if shape.qk_norm else "llama",
            "vocab_size": shape.vocab_size,
            "hidden_size": shape.hidden_size,
            "intermediate_size": shape.intermediate_size,
            "num_hidden_layers": shape.num_layers,
            "num_attention_heads": shape.num_heads,
            "num_key_value_heads": shape.num_kv_heads,
            "head_dim": shape.head_dim,
            "rms_norm_eps": shape.rms_norm_eps,
            "rope_theta": shape.rope_theta,
            "max_position_embeddings": shape.max_position,
            "attention_bias": shape.attention_bias,
        },
        "draft_vocab_size": shape.draft_vocab_size,
        "target_hidden_size": shape.target_hidden_size,
        "torch_dtype": "bfloat16",
    }
    if shape.kind == "eagle3":
        config |= {
            "eagle_aux_hidden_state_layer_ids": list(shape.taps),
            "norm_before_residual": shape.norm_before_residual,
            "norm_before_fc": shape.norm_before_fc,
            "fc_norm": shape.fc_norm,
            "norm_output": shape.norm_output,
        }
    elif shape.kind == "mtp":
        config["num_nextn_predict_layers"] = shape.num_modules
    elif shape.block_size:
        config |= {
            "aux_hidden_state_layer_ids": list(shape.taps),
            "block_size": shape.block_size,
            "mask_token_id": shape.mask_token_id,
            "sample_from_anchor": shape.from_anchor,
        }
    if shape.kind == "dspark":
        config |= {
            "markov_rank": shape.markov_rank,
            "markov_head_type": shape.markov or "vanilla",
            "enable_confidence_head": shape.confidence,
            "confidence_head_with_markov": shape.confidence_with_markov,
        }
    return config


def calibrate(confidence_logits: Tensor, overlap: Tensor, seed: int = 0) -> list[float]:
    """One temperature per position, left to right, each making the product up to it as calibrated as it can be.

    Args:
        confidence_logits, overlap: ``[A, K]`` from held-out answers; acceptance is drawn from ``overlap``.
    """
    drawn = torch.rand(overlap.shape, generator=torch.Generator().manual_seed(seed)) < overlap
    accepted = drawn.cumprod(1).bool().numpy()
    logits = confidence_logits.double().numpy()
    survival, temperatures = np.ones(len(logits)), []
    known = np.ones(len(logits), dtype=np.bool_)
    for position in range(logits.shape[1]):
        temperature = float(fit_temperature(logits[:, position], accepted[:, position], known, survival))
        temperatures.append(temperature)
        survival = survival * torch.sigmoid(torch.from_numpy(logits[:, position] / temperature)).numpy()
    return temperatures


def model_card(kind: str, facts: Mapping[str, str], history: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: what the drafter is, how it was trained, and the learning curve on held-out prompts."""
    lines = [f"# {kind} drafter for {facts['target']}", ""]
    lines += [
        f"Trained by `trimtab train {kind}`; weights in the speculators format. It drafts for {facts['target']} only: "
        "the embedding and the output head are that model's and are not in the file.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in facts.items()),
        "",
        "## Learning curve",
        "Held-out prompts, teacher-forced along the target's own answers. Length is 1 + expected accepted tokens per "
        "step; acceptance at temperature 1 is given per draft position, each under the condition that all before it "
        "were accepted.",
        "",
        "| step | tokens seen | length, temperature 1 | length, greedy | acceptance by position |",
        "|---|---|---|---|---|",
    ]
    for point in history:
        acceptance = " ".join(f"{value:.3f}" for value in point["acceptance"])
        lines.append(
            f"| {point['step']} | {point['tokens_seen']:,} | {point['length']:.3f} | {point['greedy_length']:.3f} "
            f"| {acceptance} |"
        )
    return "\n".join(lines) + "\n"
