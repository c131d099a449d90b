"""Tiny drafter checkpoints in each published layout, for the tiny target of `tests.tiny` with six layers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

V, H, F, L = 64, 32, 48, 6
HEADS, KV, D = 4, 2, 8
RANK, BLOCK, MASK = 6, 4, 3
THETA, EPS = 10000.0, 1e-5
DRAFT_IDS = torch.tensor([0, 1, 2, *range(5, 62, 2)])  # a reduced vocabulary of 32

LAYER_CONFIG = {
    "vocab_size": V,
    "hidden_size": H,
    "intermediate_size": F,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "head_dim": D,
    "rms_norm_eps": EPS,
    "rope_theta": THETA,
    "max_position_embeddings": 256,
}


@dataclass(frozen=True)
class Layout:
    """A published layout: what to write, what it must be read as.

    Attributes:
        canonical: name in the file to the name that the reference uses.
        taps: hidden states of the target it reads.
    """

    name: str
    kind: str
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    canonical: Callable[[str], str]
    taps: tuple[int, ...]
    from_anchor: bool = False
    markov: str = ""
    draft_ids: Tensor | None = None

    def save(self, directory: Path) -> str:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(self.config))
        save_file({name: tensor.contiguous() for name, tensor in self.tensors.items()}, directory / "model.safetensors")
        return str(directory)

    def reference(self) -> dict[str, Tensor]:
        return {self.canonical(name): tensor for name, tensor in self.tensors.items()}


def weights(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        made[name] = 1 + 0.2 * noise if "norm" in name else noise * (2.0 / shape[-1] ** 0.5)
    return made


def layer_shapes(
    prefix: str, inputs: int = H, qk_norm: bool = False, input_norm: bool = True, bias: bool = False
) -> Any:
    shapes: dict[str, tuple[int, ...]] = {
        f"{prefix}self_attn.q_proj.weight": (HEADS * D, inputs),
        f"{prefix}self_attn.k_proj.weight": (KV * D, inputs),
        f"{prefix}self_attn.v_proj.weight": (KV * D, inputs),
        f"{prefix}self_attn.o_proj.weight": (H, HEADS * D),
        f"{prefix}mlp.gate_proj.weight": (F, H),
        f"{prefix}mlp.up_proj.weight": (F, H),
        f"{prefix}mlp.down_proj.weight": (H, F),
        f"{prefix}post_attention_layernorm.weight": (H,),
    }
    if input_norm:
        shapes[f"{prefix}input_layernorm.weight"] = (H,)
    if qk_norm:
        shapes |= {f"{prefix}self_attn.q_norm.weight": (D,), f"{prefix}self_attn.k_norm.weight": (D,)}
    if bias:
        shapes |= {f"{prefix}self_attn.{p}_proj.bias": (HEADS * D if p == "q" else KV * D,) for p in "qkv"}
    return shapes


def vocabulary(ids: Tensor) -> dict[str, Tensor]:
    mask = torch.zeros(V, dtype=torch.bool)
    mask[ids] = True
    return {"d2t": ids - torch.arange(len(ids)), "t2d": mask}


def speculators(kind: str, accept_k: int = 1, **extra: Any) -> dict[str, Any]:
    method = {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": accept_k}
    return {
        "speculators_model_type": kind,
        "speculators_version": "0.3.0",
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"name_or_path": "tiny", "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": LAYER_CONFIG,
        **extra,
    }


def _same(name: str) -> str:
    return name


def eagle3_speculators(**options: bool) -> Layout:
    shapes = {"fc.weight": (H, 3 * H), "norm.weight": (H,), "layers.0.hidden_norm.weight": (H,)}
    shapes |= {"lm_head.weight": (len(DRAFT_IDS), H)} | layer_shapes("layers.0.", 2 * H)
    if options.get("norm_before_fc"):
        shapes["input_norm.weight"] = (3 * H,)
    if options.get("fc_norm"):
        shapes |= {f"fc_norm.{i}.weight": (H,) for i in range(3)}
    config = speculators("eagle3", draft_vocab_size=len(DRAFT_IDS), eagle_aux_hidden_state_layer_ids=[1, 3, 5])
    config |= {"norm_before_residual": False} | options
    name = "-".join(["eagle3-speculators", *options])
    tensors = weights(shapes, 1) | vocabulary(DRAFT_IDS)
    return Layout(name, "eagle3", config, tensors, _same, (1, 3, 5), draft_ids=DRAFT_IDS)


def eagle3_original() -> Layout:
    shapes = {"fc.weight": (H, 3 * H), "norm.weight": (H,), "midlayer.hidden_norm.weight": (H,)}
    shapes |= {"lm_head.weight": (len(DRAFT_IDS), H)} | layer_shapes("midlayer.", 2 * H)
    config = {"architectures": ["LlamaForCausalLMEagle3"], **LAYER_CONFIG, "draft_vocab_size": len(DRAFT_IDS)}
    tensors = weights(shapes, 2) | vocabulary(DRAFT_IDS)
    # without ids the original taps are the outputs of layers 2, L / 2 and L - 3
    return Layout(
        "eagle3-original", "eagle3", config, tensors, lambda n: n.replace("midlayer", "layers.0"), (2, 3, 3),
        draft_ids=DRAFT_IDS,
    )  # fmt: skip


def eagle3_deepspec() -> Layout:
    shapes = {"fc.weight": (H, 3 * H), "norm.weight": (H,), "layers.0.hidden_norm.weight": (H,)}
    shapes |= {"lm_head.weight": (V, H), "embed_tokens.weight": (V, H)} | layer_shapes("layers.0.", 2 * H, True)
    config = {"architectures": ["Qwen3Eagle3Model"], **LAYER_CONFIG, "num_target_layers": L, "ttt_length": 3}
    config |= {"target_layer_ids": [0, 2, 4]}
    return Layout("eagle3-deepspec", "eagle3", config, weights(shapes, 3), _same, (1, 3, 5))


def eagle_original() -> Layout:
    shapes = {"fc.weight": (H, 2 * H), "fc.bias": (H,), "embed_tokens.weight": (V, H)}
    shapes |= layer_shapes("layers.0.", input_norm=False)
    config = {"architectures": ["LlamaForCausalLM"], **LAYER_CONFIG}
    return Layout("eagle-original", "eagle", config, weights(shapes, 4), _same, (L,))


def mtp_speculators() -> Layout:
    part = {"token_layernorm": "enorm", "hidden_layernorm": "hnorm", "input_proj": "eh_proj", "final_layernorm": "norm"}
    shapes = {f"mtp_layers.0.{old}.weight": (H, 2 * H) if old == "input_proj" else (H,) for old in part}
    shapes |= layer_shapes("mtp_layers.0.")

    def canonical(name: str) -> str:
        name = name.removeprefix("mtp_layers.0.")
        head, _, rest = name.partition(".")
        return f"0.{part[head]}.{rest}" if head in part else f"0.layer.{name}"

    return Layout("mtp-speculators", "mtp", speculators("mtp"), weights(shapes, 5), canonical, (L,))


def dflash_zlab(causal: bool = False) -> Layout:
    shapes = {"fc.weight": (H, 2 * H), "norm.weight": (H,), "hidden_norm.weight": (H,)}
    shapes |= layer_shapes("layers.0.", qk_norm=True) | layer_shapes("layers.1.", qk_norm=True)
    config = {"architectures": ["DFlashDraftModel"], **LAYER_CONFIG, "num_hidden_layers": 2, "block_size": BLOCK}
    config |= {"num_target_layers": L, "dflash_config": {"target_layer_ids": [0, 4], "mask_token_id": MASK}}
    if causal:
        config["is_causal"] = True
    name = "dflash-zlab-causal" if causal else "dflash-zlab"
    return Layout(name, "dflash", config, weights(shapes, 6), _same, (1, 5))


def dflash_speculators() -> Layout:
    shapes = {"fc.weight": (H, 2 * H), "norm.weight": (H,), "hidden_norm.weight": (H,)}
    shapes |= {"lm_head.weight": (len(DRAFT_IDS), H)} | layer_shapes("layers.0.", qk_norm=True)
    config = speculators("dflash", draft_vocab_size=len(DRAFT_IDS), block_size=BLOCK, mask_token_id=MASK)
    config |= {"aux_hidden_state_layer_ids": [1, 5], "sample_from_anchor": False}
    tensors = weights(shapes, 7) | vocabulary(DRAFT_IDS)
    return Layout("dflash-speculators", "dflash", config, tensors, _same, (1, 5), draft_ids=DRAFT_IDS)


def dflash2() -> Layout:
    base = dflash_zlab()
    config = {**base.config, "architectures": ["DFlash2DraftModel"]}
    config["dflash_config"] |= {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 5, "selector_top_k": 4}
    shapes: dict[str, tuple[int, ...]] = {"candidate_selector.hidden_projection.weight": (5, H)}
    shapes |= {f"candidate_selector.{side}_codebook": (V, 5) for side in ("predecessor", "successor")}
    for layer in range(2):
        for conv in ("attention_conv", "mlp_conv"):
            shapes[f"layers.{layer}.{conv}.base_kernel"] = (2, 2, H)
            shapes[f"layers.{layer}.{conv}.kernel_projection.weight"] = (2 * 2 * H // 8, H)
    return Layout("dflash2", "dflash", config, base.tensors | weights(shapes, 8), _same, (1, 5))


def dspark(markov: str, published: str) -> Layout:
    reduced = published == "speculators"
    ids = DRAFT_IDS if reduced else None
    size = len(DRAFT_IDS) if reduced else V
    shapes = {"fc.weight": (H, 2 * H), "norm.weight": (H,), "hidden_norm.weight": (H,), "lm_head.weight": (size, H)}
    shapes |= layer_shapes("layers.0.", qk_norm=True)
    shapes |= {"markov_head.markov_w1.weight": (V, RANK), "markov_head.markov_w2.weight": (size, RANK)}
    shapes |= {"confidence_head.proj.weight": (1, H + RANK), "confidence_head.proj.bias": (1,)}
    if markov == "gated":
        shapes |= {"markov_head.gate_proj.weight": (RANK, H + RANK), "markov_head.gate_proj.bias": (RANK,)}
    if markov == "rnn":
        shapes |= {
            "markov_head.joint_proj.weight": (3 * RANK, 2 * RANK + H),
            "markov_head.joint_proj.bias": (3 * RANK,),
        }
    heads = {"markov_rank": RANK, "markov_head_type": markov, "enable_confidence_head": True}
    heads |= {"confidence_head_with_markov": True, "block_size": BLOCK, "mask_token_id": MASK}
    if reduced:
        config = speculators("dspark", draft_vocab_size=size, aux_hidden_state_layer_ids=[1, 5], **heads)
        config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = BLOCK
        config["sample_from_anchor"] = True
        tensors = weights(shapes, 9) | vocabulary(DRAFT_IDS)
    else:
        config = {"architectures": ["Qwen3DSparkModel"], **LAYER_CONFIG, **heads, "target_layer_ids": [0, 4]}
        config["num_target_layers"] = L
        tensors = weights(shapes | {"embed_tokens.weight": (V, H)}, 10)
    name = f"dspark-{published}-{markov}"
    return Layout(name, "dspark", config, tensors, _same, (1, 5), from_anchor=True, markov=markov, draft_ids=ids)


ALL = [
    eagle3_speculators(),
    eagle3_speculators(norm_before_residual=True, norm_output=True),
    eagle3_speculators(norm_before_fc=True),
    eagle3_speculators(fc_norm=True),
    eagle3_original(),
    eagle3_deepspec(),
    eagle_original(),
    mtp_speculators(),
    dflash_zlab(),
    dflash_zlab(causal=True),
    dflash_speculators(),
    dflash2(),
    dspark("vanilla", "deepspec"),
    dspark("gated", "speculators"),
    dspark("rnn", "deepspec"),
]
