"""Runs a Hugging Face causal LM over our paged cache: one ragged batch in, logits and tapped hidden states out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.models.attention import BACKENDS, AttentionMetadata, paged_attention
from trimtab.models.kv_cache import KVCache, LayerCache
from trimtab.models.loader import LoadedModel, ModelLoadError, output_head

ATTENTION_NAME = "trimtab_paged"


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Sizes of a model that the engine and the drafters read."""

    num_layers: int
    hidden_size: int
    vocab_size: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One ragged step; ``T = sum(query_lens)``.

    Attributes:
        token_ids: ``[T]`` int64, requests one after another.
        query_lens: ``[R]`` new tokens per request.
        context_lens: ``[R]`` tokens already cached; the new ones stand at the positions after them.
        block_tables: ``[R]`` block ids covering context and query.
        logit_rows: ``[L]`` int64 rows of T whose logits are wanted.
    """

    token_ids: Tensor
    query_lens: Sequence[int]
    context_lens: Sequence[int]
    block_tables: Sequence[Sequence[int]]
    logit_rows: Tensor


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """``logits [L, vocab_size]`` float32 and ``features [T, num_taps * hidden_size]`` (None without taps)."""

    logits: Tensor
    features: Tensor | None


@dataclass(slots=True)
class _StepState:
    """What the attention modules read during a forward pass."""

    metadata: AttentionMetadata | None = None


class ModelExecutor:
    """A model, its cache, and the hidden states tapped on the way.

    Args:
        loaded: from :func:`trimtab.models.loader.load_model`.
        num_blocks, block_size: size of the cache.
        taps: indices into the model's hidden states (0 = embeddings, i = output of layer i), ascending or not;
            features are concatenated in this order.

    Raises:
        ModelLoadError: if the architecture does not route attention through transformers' attention interface.
        ValueError: if a tap is outside the model.
    """

    def __init__(self, loaded: LoadedModel, num_blocks: int, block_size: int, taps: tuple[int, ...] = ()) -> None:
        _register()
        self.loaded = loaded
        self.model = loaded.model
        self.body = loaded.model.base_model
        self.embed_tokens: nn.Module = loaded.model.get_input_embeddings()
        self.lm_head = output_head(loaded.model)
        self.final_norm: nn.Module | None = getattr(self.body, "norm", None)
        self.block_size = block_size
        self.device = loaded.device
        self.supports_variable_length = BACKENDS["paged"].supports_variable_length
        self._attentions = [m for m in self.body.modules() if hasattr(m, "layer_idx") and hasattr(m, "o_proj")]
        self.info = _model_info(loaded.model, self._attentions, loaded.tokenizer)
        self.dtype: torch.dtype = next(self.embed_tokens.parameters()).dtype
        self.cache = KVCache(
            self.info.num_layers,
            num_blocks,
            block_size,
            self.info.num_kv_heads,
            self.info.head_dim,
            self.dtype,
            self.device,
        )
        self._state = _StepState()
        for module in self._attentions:
            module.trimtab = (self._state, self.cache.layer(module.layer_idx))
        self.model.config._attn_implementation = ATTENTION_NAME
        self.taps: tuple[int, ...] = ()
        self._tapped: dict[int, Tensor] = {}
        self._hooks: list[Any] = []
        self.set_taps(taps)

    def set_taps(self, taps: tuple[int, ...]) -> None:
        """Choose which hidden states `forward` returns as features."""
        outside = [tap for tap in taps if not 0 <= tap <= self.info.num_layers]
        if outside:
            raise ValueError(f"taps {outside} are outside 0..{self.info.num_layers} of this model")
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.taps = taps
        for tap in set(taps):
            module = self.embed_tokens if tap == 0 else self.body.layers[tap - 1]
            self._hooks.append(module.register_forward_hook(self._keep(tap)))

    def _keep(self, tap: int) -> Any:
        def hook(_module: nn.Module, _arguments: object, output: Any) -> None:
            self._tapped[tap] = output[0] if isinstance(output, tuple) else output

        return hook

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        """Run one step: write the new tokens' keys and values, return the wanted logits."""
        metadata = AttentionMetadata.build(
            batch.query_lens, batch.context_lens, batch.block_tables, self.block_size, self.device, self.dtype
        )
        self._state.metadata = metadata
        try:
            hidden = self.body(
                input_ids=batch.token_ids.to(self.device).unsqueeze(0),
                position_ids=metadata.positions.unsqueeze(0),
                use_cache=False,
            ).last_hidden_state[0]
            tapped = [self._tapped[tap].reshape(-1, self.info.hidden_size) for tap in self.taps]
        finally:
            self._state.metadata = None
            self._tapped.clear()
        wanted = hidden if len(batch.logit_rows) == len(hidden) else hidden[batch.logit_rows.to(self.device)]
        return ForwardOutput(self.lm_head(wanted).float(), torch.cat(tapped, dim=-1) if tapped else None)


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, _mask: object, scaling: float | None = None, **_: object
) -> tuple[Tensor, None]:
    """transformers' attention interface: ``[1, heads, T, head_dim]`` in, ``[1, T, heads, head_dim]`` out."""
    state, cache = module.trimtab
    assert isinstance(state, _StepState)
    assert isinstance(cache, LayerCache)
    assert state.metadata is not None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    query, key, value = (states[0].transpose(0, 1) for states in (query, key, value))
    return paged_attention(query, key, value, cache, state.metadata, scale).unsqueeze(0), None


def _no_mask(*_: object, **__: object) -> None:
    """The cache knows what each token may see; transformers need not build a mask."""


def _register() -> None:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(ATTENTION_NAME, _attention)
    AttentionMaskInterface.register(ATTENTION_NAME, _no_mask)


def _model_info(model: Any, attentions: Sequence[Any], tokenizer: Any) -> ModelInfo:
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    num_layers = config.num_hidden_layers
    if sorted(module.layer_idx for module in attentions) != list(range(num_layers)):
        raise ModelLoadError(
            f"{type(model).__name__} does not use transformers' attention interface in all {num_layers} layers; "
            "only decoder-only models that do are supported"
        )
    eos = getattr(model.generation_config, "eos_token_id", None)
    ids = {*(eos if isinstance(eos, list) else [eos]), getattr(tokenizer, "eos_token_id", None)} - {None}
    return ModelInfo(
        num_layers=num_layers,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        max_model_len=getattr(config, "max_position_embeddings", 2048),
        eos_token_ids=tuple(sorted(int(i) for i in ids)),
    )
