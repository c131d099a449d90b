"""A drafter's own keys and values, in the target's block tables: prefix caching and preemption hold for both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from trimtab.drafters.base import DraftBatch
from trimtab.drafters.layers import Attend
from trimtab.models.attention import AttentionMetadata, paged_attention
from trimtab.models.executor import ModelExecutor
from trimtab.models.kv_cache import KVCache, LayerCache


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the T committed rows of a batch lie.

    Attributes:
        positions, slots: ``[T]`` int64 position in its request, and place in the cache.
        last_rows: ``[R]`` last row of each request.
    """

    positions: Tensor
    slots: Tensor
    last_rows: Tensor


class DraftCache:
    """Keys and values of a drafter's layers, as many blocks as the target has."""

    def __init__(self, num_layers: int, num_kv_heads: int, head_dim: int, target: ModelExecutor) -> None:
        self.block_size = target.block_size
        self.dtype = target.dtype
        self.device = target.device
        self.head_dim = head_dim
        self.kv = KVCache(
            num_layers, target.cache.num_blocks, target.block_size, num_kv_heads, head_dim, target.dtype, target.device
        )

    def layer(self, index: int) -> LayerCache:
        return self.kv.layer(index)

    def place(self, batch: DraftBatch) -> Placement:
        positions: list[int] = []
        slots: list[int] = []
        last_rows: list[int] = []
        for count, start, table in zip(batch.num_new, batch.start_positions, batch.block_tables, strict=True):
            span = range(start, start + count)
            positions.extend(span)
            size = self.block_size
            slots.extend(table[position // size] * size + position % size for position in span)
            last_rows.append(len(positions) - 1)
        return Placement(
            torch.tensor(positions, device=self.device),
            torch.tensor(slots, device=self.device),
            torch.tensor(last_rows, device=self.device),
        )

    def attend(
        self, query_lens: Sequence[int], context_lens: Sequence[int], block_tables: Sequence[Sequence[int]]
    ) -> Attend:
        """Causal attention that also stores the rows' keys and values."""
        metadata = AttentionMetadata.build(
            query_lens, context_lens, block_tables, self.block_size, self.device, self.dtype
        )
        scale = self.head_dim**-0.5

        def attend(index: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            return paged_attention(queries, keys, values, self.layer(index), metadata, scale)

        return attend


class BlockAttention:
    """Attention of draft blocks: each row sees its request's context and its own block, and nothing is stored.

    Args:
        context_lens: ``[R]`` committed positions of each request.
        block_size: rows of a draft block (not of the cache).
        causal: rows see only earlier rows of their block.
    """

    def __init__(
        self,
        cache: DraftCache,
        block_tables: Sequence[Sequence[int]],
        context_lens: Tensor,
        block_size: int,
        causal: bool = False,
    ) -> None:
        self.cache, self.block_size = cache, block_size
        self.num_requests = len(block_tables)
        num_blocks = -(-int(context_lens.max()) // cache.block_size)
        tables = [list(table[:num_blocks]) for table in block_tables]
        self.blocks = torch.tensor([table + [table[0]] * (num_blocks - len(table)) for table in tables])
        self.blocks = self.blocks.to(cache.device)
        length = num_blocks * cache.block_size
        visible = (torch.arange(length, device=cache.device) < context_lens.unsqueeze(1)).unsqueeze(1)
        own = torch.ones(block_size, block_size, dtype=torch.bool, device=cache.device)
        own = own.tril() if causal else own
        both = torch.cat(
            [visible.expand(-1, block_size, -1), own.expand(self.num_requests, -1, -1)], dim=-1
        )  # [R, block_size, length + block_size]
        self.mask = torch.zeros(both.shape, dtype=cache.dtype, device=cache.device)
        self.mask = self.mask.masked_fill_(~both, float("-inf")).unsqueeze(1)

    def __call__(self, index: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        layer = self.cache.layer(index)
        all_keys, all_values = self._joined(layer.keys, keys), self._joined(layer.values, values)
        heads = queries.shape[1] // all_keys.shape[1]
        folded = queries.view(self.num_requests, self.block_size, all_keys.shape[1], heads, -1)
        folded = folded.permute(0, 2, 3, 1, 4).flatten(2, 3)  # [R, kv heads, heads * block_size, D]
        mask = self.mask.repeat(1, 1, heads, 1)
        output = scaled_dot_product_attention(folded, all_keys, all_values, attn_mask=mask)
        output = output.view(self.num_requests, -1, heads, self.block_size, output.shape[-1]).permute(0, 3, 1, 2, 4)
        return output.reshape(queries.shape)

    def _joined(self, pool: Tensor, own: Tensor) -> Tensor:
        """``[R, kv heads, length + block_size, D]``."""
        context = pool.index_select(0, self.blocks.flatten()).view(self.num_requests, -1, *pool.shape[2:])
        return torch.cat([context, own.view(self.num_requests, self.block_size, *own.shape[1:])], dim=1).transpose(1, 2)
