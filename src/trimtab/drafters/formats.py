"""Published drafter checkpoints, brought to one form: a :class:`DraftShape` and tensors by our names.

Layouts differ in what a target layer id counts, in how a reduced vocabulary is stored and in their defaults; a wrong
reading does not crash, it silently halves acceptance. Everything is settled here, per format:

* speculators (``speculators_model_type``): ids index ``hidden_states``;
* EAGLE's own repositories (``midlayer.*``, or ``fc`` beside layers without an input norm);
* z-lab DFlash (``dflash_config``) and DeepSpec (``target_layer_ids`` at the top): id l is ``hidden_states[l + 1]``;
* MTP modules inside a target checkpoint (DeepSeek and GLM, Qwen, MiMo).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from trimtab.drafters.networks import DraftShape
from trimtab.models.executor import ModelInfo

Config = Mapping[str, Any]
Tensors = dict[str, Tensor]
DEFAULT_POSITIONS = 5
# Qwen's hybrid models store norm weights as their difference from 1.
ZERO_CENTRED_NORMS = ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")


class CheckpointError(ValueError):
    """A drafter checkpoint can not be used with this target; the message holds both values and the remedy."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """A checkpoint in our form; ``after_norm``: it reads the last hidden state behind the target's final norm."""

    shape: DraftShape
    tensors: Tensors
    after_norm: bool = False


def parse(config: Config, tensors: Tensors, info: ModelInfo, allow_lossy: bool) -> Parsed:
    """Recognise the format of a drafter directory and normalise it.

    Args:
        config: its config.json; ``tensors``: every tensor of it.
        info: the target's sizes, for defaults that depend on them.

    Raises:
        CheckpointError: if the format is unknown, or its verification would be lossy.
    """
    architecture = str((config.get("architectures") or [""])[0])
    if "speculators_model_type" in config or "speculators_config" in config:
        return _speculators(config, tensors, info, allow_lossy)
    if "dflash_config" in config:
        return Parsed(_zlab_shape(config, tensors, info), _plain(tensors))
    if "target_layer_ids" in config:
        return _deepspec(config, architecture, tensors, info)
    if "fc.weight" in _plain(tensors):
        return _eagle(config, tensors, info)
    raise CheckpointError(
        f"not a drafter checkpoint that is known here (architecture {architecture or 'missing'}): expected the "
        "speculators format, EAGLE, EAGLE-3, z-lab DFlash or DeepSpec"
    )


def _speculators(config: Config, tensors: Tensors, info: ModelInfo, allow_lossy: bool) -> Parsed:
    inner = config.get("speculators_config") or {}
    kind = str(config.get("speculators_model_type") or inner.get("algorithm"))
    methods = inner.get("proposal_methods") or [{}]
    chosen = next((m for m in methods if m.get("proposal_type") == inner.get("default_proposal_method")), methods[0])
    accept_k = int(chosen.get("verifier_accept_k") or 1)
    if accept_k > 1 and not allow_lossy:
        raise CheckpointError(
            f"the checkpoint asks for verifier_accept_k {accept_k}, which would change the target's output (only 1 is "
            'lossless); set "allow_lossy": true to use its weights anyway'
        )
    positions = int(chosen.get("speculative_tokens") or DEFAULT_POSITIONS)
    layers = config.get("transformer_layer_config") or {}
    tensors = _plain(tensors)
    shape = _base(kind, layers, tensors, info, config.get("draft_vocab_size"), positions)
    if kind == "eagle3":
        # absent norm_before_residual: vLLM reads True
        shape = replace(
            shape,
            taps=_taps(config.get("eagle_aux_hidden_state_layer_ids"), info, 0),
            norm_before_residual=bool(config.get("norm_before_residual", True)),
            norm_before_fc=bool(config.get("norm_before_fc")),
            fc_norm=bool(config.get("fc_norm")),
            norm_output=bool(config.get("norm_output")),
        )
        return Parsed(shape, tensors)
    if kind in ("dflash", "dflash2", "dspark"):
        from_anchor = bool(config.get("sample_from_anchor", kind == "dspark"))
        block_size = int(config.get("block_size", 8))
        causal = _slides(layers) and not config.get("sliding_window_non_causal")
        shape = replace(
            shape,
            kind="dspark" if kind == "dspark" else "dflash",
            taps=_taps(config.get("aux_hidden_state_layer_ids"), info, 0),
            num_positions=min(positions, block_size - (not from_anchor)),
        )
        shape = _block(shape, config, config, tensors, block_size, from_anchor, causal)
        return Parsed(shape, tensors)
    if kind == "mtp":
        return _mtp(shape, tensors, "mtp_layers", info)
    if kind == "eagle":
        return Parsed(_eagle_shape(shape, tensors, info), tensors, after_norm=True)
    raise CheckpointError(f'speculators_model_type "{kind}" is not supported; use eagle3, eagle, mtp, dflash or dspark')


def _zlab_shape(config: Config, tensors: Tensors, info: ModelInfo) -> DraftShape:
    inner = config["dflash_config"]
    _same("num_target_layers", config.get("num_target_layers"), info.num_layers, "layers")
    block_size = int(inner.get("block_size") or config.get("block_size") or 16)
    tensors = _plain(tensors)
    shape = _base("dflash", config, tensors, info, config.get("draft_vocab_size"), block_size - 1)
    causal = next((c for c in (config.get("is_causal"), inner.get("causal")) if c is not None), _slides(config))
    shape = replace(shape, taps=_taps(inner.get("target_layer_ids"), info, 1))
    return _block(shape, config, inner, tensors, block_size, False, bool(causal))


def _deepspec(config: Config, architecture: str, tensors: Tensors, info: ModelInfo) -> Parsed:
    _same("num_target_layers", config.get("num_target_layers"), info.num_layers, "layers")
    tensors = _plain(tensors)
    taps = _taps(config["target_layer_ids"], info, 1)
    if "Eagle3" in architecture:
        if int(config["num_hidden_layers"]) > 1:
            raise CheckpointError(
                f"DeepSpec EAGLE-3 with {config['num_hidden_layers']} layers reads the embedding in each, which "
                "is not supported; use a checkpoint with one layer"
            )
        positions = int(config.get("ttt_length", DEFAULT_POSITIONS))
        shape = _base("eagle3", config, tensors, info, config.get("draft_vocab_size"), positions)
        return Parsed(replace(shape, taps=taps), tensors)
    block_size = int(config["block_size"])
    kind = "dspark" if int(config.get("markov_rank") or 0) or config.get("enable_confidence_head") else "dflash"
    shape = _base(kind, config, tensors, info, config.get("draft_vocab_size"), block_size)
    # every DeepSpec block drafter predicts from its anchor, those without a Markov head too
    return Parsed(_block(replace(shape, taps=taps), config, config, tensors, block_size, True, False), tensors)


def _eagle(config: Config, tensors: Tensors, info: ModelInfo) -> Parsed:
    tensors = {re.sub(r"^midlayer\.", "layers.0.", name): tensor for name, tensor in _plain(tensors).items()}
    shape = _base("eagle3", config, tensors, info, config.get("draft_vocab_size"), DEFAULT_POSITIONS)
    if "layers.0.hidden_norm.weight" in tensors:
        inner = config.get("eagle_config") or {}
        ids = inner.get("eagle_aux_hidden_state_layer_ids") or config.get("eagle_aux_hidden_state_layer_ids")
        shape = replace(
            shape, taps=_taps(ids, info, 0), norm_before_residual=bool(config.get("norm_before_residual", False))
        )
        return Parsed(shape, tensors)
    return Parsed(_eagle_shape(shape, tensors, info), tensors, after_norm=True)


def _eagle_shape(shape: DraftShape, tensors: Tensors, info: ModelInfo) -> DraftShape:
    return replace(shape, kind="eagle", taps=(info.num_layers,), fc_bias="fc.bias" in tensors)


def parse_mtp(config: Config, tensors: Tensors, info: ModelInfo) -> Parsed:
    """MTP modules of a target checkpoint.

    Args:
        config: the target's config.json; ``tensors``: those whose names `is_mtp_tensor` accepts.

    Raises:
        CheckpointError: if there are none, or their layers are not plain attention and a gated MLP.
    """
    inner = config.get("text_config") or config
    found = _plain(tensors)
    prefix = next((p for p in ("mtp_layers", "mtp") if any(name.startswith(p + ".") for name in found)), "layers")
    if not found:
        raise CheckpointError("the target checkpoint holds no MTP modules; give a drafter checkpoint or another method")
    if str(inner.get("model_type")) in ZERO_CENTRED_NORMS:
        found = {name: t + 1 if "norm" in name else t for name, t in found.items()}
    shape = _base("mtp", inner, found, info, None, 1)
    return _mtp(replace(shape, hidden_first=prefix == "mtp_layers"), found, prefix, info)


def is_mtp_tensor(name: str, num_layers: int) -> bool:
    """Whether a tensor of a target checkpoint belongs to its MTP modules (layers past the last one included)."""
    match = re.match(r"(?:model\.)?layers\.(\d+)\.", name)
    return bool(re.match(r"(?:model\.)?mtp(_layers)?\.", name)) or (match is not None and int(match[1]) >= num_layers)


_MTP_NAMES = {
    "token_layernorm": "enorm",
    "pre_fc_norm_embedding": "enorm",
    "hidden_layernorm": "hnorm",
    "pre_fc_norm_hidden": "hnorm",
    "input_proj": "eh_proj",
    "fc": "eh_proj",
    "final_layernorm": "norm",
    "shared_head.norm": "norm",
}


def _mtp(shape: DraftShape, tensors: Tensors, prefix: str, info: ModelInfo) -> Parsed:
    renamed: Tensors = {}
    modules = set()
    for name, tensor in tensors.items():
        match = re.match(r"(?:mtp_layers|layers)\.(\d+)\.(.*)", name) if prefix != "mtp" else None
        if prefix == "mtp":
            index, rest = 0, name.removeprefix("mtp.").removeprefix("layers.0.")
        elif match:
            index = int(match[1]) - (0 if prefix == "mtp_layers" else info.num_layers)
            rest = match[2]
        else:
            renamed[name] = tensor
            continue
        modules.add(index)
        part = next((old for old in _MTP_NAMES if rest.startswith(old + ".")), None)
        if part is not None:
            rest = _MTP_NAMES[part] + rest[len(part) :]
        elif re.match(r"(self_attn|mlp|input_layernorm|post_attention_layernorm)\.", rest):
            rest = "layer." + rest
        elif rest.startswith(("embed_tokens.", "shared_head.head.")):
            name = "embed_tokens.weight" if rest.startswith("embed") else "lm_head.weight"
            renamed.setdefault(name, tensor)  # all modules share them
            continue
        renamed[f"mtp_layers.{index}.{rest}"] = tensor
    if any(".experts." in name or ".q_a_proj" in name or "kv_a_proj" in name for name in renamed):
        raise CheckpointError(
            "these MTP modules use experts or latent attention; only plain attention with a gated MLP is supported"
        )
    shape = replace(
        shape,
        kind="mtp",
        taps=(info.num_layers,),
        num_modules=len(modules),
        num_layers=1,
        num_positions=max(shape.num_positions, len(modules)),
        qk_norm="mtp_layers.0.layer.self_attn.q_norm.weight" in renamed,
        attention_bias="mtp_layers.0.layer.self_attn.q_proj.bias" in renamed,
    )
    return Parsed(shape, renamed, after_norm=True)


def _base(
    kind: str, layers: Config, tensors: Tensors, info: ModelInfo, draft_vocab_size: Any, num_positions: int
) -> DraftShape:
    """Sizes that all formats name alike, checked against the target."""
    hidden_size = int(layers.get("hidden_size", info.hidden_size))
    heads = int(layers.get("num_attention_heads", 1))
    vocab_size = int(layers.get("vocab_size", info.vocab_size))
    _same("vocab_size", vocab_size, info.vocab_size, "tokens")
    rope = layers.get("rope_parameters") or {}
    scaling = layers.get("rope_scaling") or rope
    rope_type = scaling.get("rope_type", scaling.get("type", "default")) if isinstance(scaling, Mapping) else "default"
    if rope_type != "default":
        raise CheckpointError(f'rotary embedding of type "{rope_type}" is not supported in drafters, only "default"')
    window = layers.get("sliding_window") if _slides(layers) else None
    longest = int(layers.get("max_position_embeddings") or info.max_model_len)
    return DraftShape(
        kind=kind,
        vocab_size=vocab_size,
        draft_vocab_size=int(draft_vocab_size or (len(tensors["d2t"]) if "d2t" in tensors else vocab_size)),
        hidden_size=hidden_size,
        intermediate_size=int(layers.get("intermediate_size", 4 * hidden_size)),
        num_layers=int(layers.get("num_hidden_layers", 1)),
        num_heads=heads,
        num_kv_heads=int(layers.get("num_key_value_heads") or heads),
        head_dim=int(layers.get("head_dim") or hidden_size // heads),
        rms_norm_eps=float(layers.get("rms_norm_eps", 1e-6)),
        rope_theta=float(rope.get("rope_theta") or layers.get("rope_theta") or 10000.0),
        taps=(),
        target_hidden_size=info.hidden_size,
        num_positions=num_positions,
        max_position=min(longest, int(window)) if window else longest,  # a window that never slides is full attention
        qk_norm="layers.0.self_attn.q_norm.weight" in tensors,
        attention_bias="layers.0.self_attn.q_proj.bias" in tensors,
    )


def _block(
    shape: DraftShape, config: Config, inner: Config, tensors: Tensors, block_size: int, from_anchor: bool, causal: bool
) -> DraftShape:
    """Options of block drafters; ``inner`` holds those of the mask, the convolution and the selector."""
    rank = int(config.get("markov_rank") or 0) if "markov_head.markov_w1.weight" in tensors else 0
    mask = inner.get("mask_token_id", config.get("mask_token_id"))
    if mask is None:
        raise CheckpointError("the checkpoint names no mask_token_id; a block can not be filled without one")
    confidence = "confidence_head.proj.weight" in tensors
    return replace(
        shape,
        block_size=block_size,
        mask_token_id=int(mask),
        from_anchor=from_anchor,
        causal=causal,
        markov=str(config.get("markov_head_type", "vanilla")) if rank else "",
        markov_rank=rank,
        confidence=confidence,
        confidence_temperatures=tuple(float(t) for t in config.get("confidence_temperatures") or ()),
        confidence_with_markov=confidence and bool(config.get("confidence_head_with_markov", True)) and rank > 0,
        conv_kernel_size=int(inner.get("conv_kernel_size") or 0),
        conv_group_size=int(inner.get("conv_group_size") or 0),
        selector_rank=int(inner.get("selector_rank") or 0),
        selector_top_k=int(inner.get("selector_top_k") or 0),
    )


def _plain(tensors: Tensors) -> Tensors:
    """Names without a ``model.`` in front."""
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}


def _taps(ids: Any, info: ModelInfo, offset: int) -> tuple[int, ...]:
    """Indices into ``hidden_states`` from a format's layer ids, EAGLE-3's default if there are none."""
    if ids is None:
        return (2, info.num_layers // 2, info.num_layers - 3)
    taps = tuple(int(i) + offset for i in ids)
    outside = [tap for tap in taps if not 0 <= tap <= info.num_layers]
    if outside:
        raise CheckpointError(
            f"the checkpoint reads hidden states {list(taps)}, the target has 0 to {info.num_layers}; "
            "it was made for another target"
        )
    return taps


def _slides(layers: Config) -> bool:
    return "sliding_attention" in (layers.get("layer_types") or [])


def _same(name: str, found: Any, expected: int, unit: str) -> None:
    if found is not None and int(found) != expected:
        raise CheckpointError(
            f"{name} of the checkpoint is {found}, the target has {expected} {unit}; it was made for another target"
        )
