"""DFlash: a whole block of draft positions in one pass, conditioned on the target's hidden states.

Context keys and values come from the target's taps; a block of [anchor, mask, mask, ...] attends to them and to itself.
Row k of the block predicts the token at its own position, so row 0 (the anchor, already known) predicts nothing.
DFlash2 adds a convolution along the block around each sublayer, and a selector that walks from the anchor over the
most likely candidates of each row: its draft law is a softmax over those and exactly 0 elsewhere.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from trimtab.drafters.base import DraftBatch, DraftSampler
from trimtab.drafters.checkpoint import DraftCheckpoint
from trimtab.drafters.layers import Attend, RMSNorm
from trimtab.drafters.networks import DraftNetwork, DraftShape, decoder_layer
from trimtab.drafters.paged import BlockAttention, DraftCache
from trimtab.models.executor import ModelExecutor


class BlockConvolution(nn.Module):
    """Grouped dynamic depthwise convolution along a block: ``out[i] = sum_t (base[t] + delta[i, t]) * x[i - t]``.

    ``delta`` is predicted from the sublayer's input and shared by the channels of a group; side 0 is applied before
    the sublayer and side 1 behind it. Nothing crosses the start of the block.
    """

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.block_size, self.kernel_size = shape.block_size, shape.conv_kernel_size
        self.group_size = shape.conv_group_size
        groups = shape.hidden_size // self.group_size
        self.base_kernel = nn.Parameter(torch.zeros(2, self.kernel_size, shape.hidden_size))
        self.kernel_projection = nn.Linear(shape.hidden_size, 2 * self.kernel_size * groups, bias=False)

    def coefficients(self, hidden: Tensor) -> Tensor:
        """``[R, block_size, 2, kernel_size, hidden_size]`` from the sublayer's input, flattened over blocks."""
        groups = hidden.shape[-1] // self.group_size
        delta = self.kernel_projection(hidden).view(-1, self.block_size, 2, self.kernel_size, groups)
        output: Tensor = delta.repeat_interleave(self.group_size, dim=-1) + self.base_kernel
        return output

    def apply_side(self, states: Tensor, coefficients: Tensor, side: int) -> Tensor:
        """``[R * block_size, hidden_size]`` in and out."""
        blocks = states.view(-1, self.block_size, states.shape[-1])
        output = torch.zeros_like(blocks)
        for tap in range(self.kernel_size):
            shifted = functional.pad(blocks, (0, 0, tap, 0))[:, : self.block_size]
            output = output + coefficients[:, :, side, tap] * shifted
        return output.view_as(states)


class ConvolvedLayer(nn.Module):
    """A decoder layer with a block convolution around its attention and around its MLP."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        layer = decoder_layer(shape)
        self.self_attn, self.mlp = layer.self_attn, layer.mlp
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.attention_conv = BlockConvolution(shape)
        self.mlp_conv = BlockConvolution(shape)

    def forward(self, hidden: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend, index: int) -> Tensor:
        normed = self.input_layernorm(hidden)
        coefficients = self.attention_conv.coefficients(normed)
        mixed = self.attention_conv.apply_side(normed, coefficients, 0)
        queries = self.self_attn.queries(mixed, rotation)
        attended = attend(index, queries, *self.self_attn.keys_values(mixed, rotation))
        hidden = hidden + self.attention_conv.apply_side(self.self_attn.o_proj(attended.flatten(1)), coefficients, 1)
        normed = self.post_attention_layernorm(hidden)
        coefficients = self.mlp_conv.coefficients(normed)
        output = self.mlp(self.mlp_conv.apply_side(normed, coefficients, 0))
        return hidden + self.mlp_conv.apply_side(output, coefficients, 1)


class CandidateSelector(nn.Module):
    """Scores of candidates given the token before: ``<A[previous] * project(h), B[candidate]> + own logit``."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.hidden_projection = nn.Linear(shape.hidden_size, shape.selector_rank, bias=False)
        self.predecessor_codebook = nn.Parameter(torch.zeros(shape.vocab_size, shape.selector_rank))
        self.successor_codebook = nn.Parameter(torch.zeros(shape.vocab_size, shape.selector_rank))
        self.top_k = shape.selector_top_k

    def rescore(self, logits: Tensor, hidden: Tensor, previous: Tensor) -> Tensor:
        """One block row.

        Args:
            logits: ``[R, vocab_size]``; ``hidden``: ``[R, hidden_size]``; ``previous``: ``[R]`` token before.

        Returns:
            ``[R, vocab_size]`` scores of the ``top_k`` candidates, -inf elsewhere.
        """
        top = logits.topk(min(self.top_k, logits.shape[-1]), dim=-1)
        gate = self.predecessor_codebook[previous] * self.hidden_projection(hidden)
        edges = torch.einsum("rd,rkd->rk", gate, self.successor_codebook[top.indices])
        return torch.full_like(logits, float("-inf")).scatter(1, top.indices, top.values + edges.to(logits.dtype))


class BlockNetwork(DraftNetwork):
    """Backbone of DFlash and DSpark."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__(shape)
        self.fc = nn.Linear(len(shape.taps) * shape.target_hidden_size, shape.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        kind = ConvolvedLayer if shape.conv_kernel_size else decoder_layer
        self.layers = nn.ModuleList([kind(shape) for _ in range(shape.num_layers)])
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.candidate_selector = CandidateSelector(shape) if shape.selector_rank else None

    def context(self, features: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of every layer at committed positions, from ``features [T, num_taps * hidden_size]``."""
        fused = self.hidden_norm(self.fc(features))
        rotation = self.rotary(positions)
        return [layer.self_attn.keys_values(fused, rotation) for layer in self.layers]  # type: ignore[union-attr,operator]

    def block(self, anchor_ids: Tensor, anchor_positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states of the rows that predict something.

        Args:
            anchor_ids: ``[R]`` last known token of each request.
            anchor_positions: ``[R]`` its position.
            attend: sees ``R * block_size`` rows, block after block.

        Returns:
            ``[R, K, hidden_size]`` after the final norm, K = block_size (from the anchor) or block_size - 1.
        """
        size = self.shape.block_size
        ids = anchor_ids.new_full((len(anchor_ids), size), self.shape.mask_token_id)
        ids[:, 0] = anchor_ids
        positions = anchor_positions.unsqueeze(1) + torch.arange(size, device=anchor_ids.device)
        hidden = self.embed(ids.flatten())
        rotation = self.rotary(positions.flatten())
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, rotation, attend, index)
        blocks: Tensor = self.norm(hidden).view(len(anchor_ids), size, -1)
        return blocks if self.shape.from_anchor else blocks[:, 1:]


class DFlashDrafter:
    """Serves a block network. Only context keys and values are kept: a block's own are gone after the round.

    The block is always drafted whole, since fewer masks would change every row of it; sampling stops at the depth.
    """

    autoregressive = False

    def __init__(
        self, checkpoint: DraftCheckpoint, network: BlockNetwork, target: ModelExecutor, num_positions: int
    ) -> None:
        shape = network.shape
        self.name = shape.kind
        self.network, self.num_positions = network, num_positions
        self.taps = shape.taps
        self.vocab_map = checkpoint.vocab_map
        self.max_position = shape.max_position
        self.cache = DraftCache(shape.num_layers, shape.num_kv_heads, shape.head_dim, target)

    @torch.inference_mode()
    def propose(self, batch: DraftBatch, sampler: DraftSampler) -> None:
        assert batch.features is not None
        placement = self.cache.place(batch)
        features = batch.features.to(self.cache.dtype)
        for index, (keys, values) in enumerate(self.network.context(features, placement.positions)):
            self.cache.layer(index).write(keys, values, placement.slots)
        drafting = batch.drafting
        if not drafting:
            return
        last = placement.last_rows[drafting]
        anchors, contexts = batch.next_token_ids[last], placement.positions[last] + 1
        attend = BlockAttention(
            self.cache,
            [batch.block_tables[row] for row in drafting],
            contexts,
            self.network.shape.block_size,
            causal=self.network.shape.causal,
        )
        hidden = self.network.block(anchors, contexts, attend)
        self.draw(hidden, anchors, sampler)

    def draw(self, hidden: Tensor, anchors: Tensor, sampler: DraftSampler) -> None:
        """Sample from ``hidden [R', K, hidden_size]``; rows know nothing of each other's tokens without a selector."""
        depth = min(sampler.depth, self.num_positions)
        logits = self.network.logits(hidden[:, :depth].flatten(0, 1)).view(len(hidden), depth, -1)
        selector, previous = self.network.candidate_selector, anchors
        for k in range(depth):
            row = logits[:, k]
            if selector is not None:
                row = selector.rescore(row, hidden[:, k], previous)
            previous = sampler.sample(row, k)
