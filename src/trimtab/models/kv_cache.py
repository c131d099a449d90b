"""Paged key/value storage: blocks of tokens, one pool per layer. Which request owns a block is not its business."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Storage of one layer, token-major inside a block: a run of blocks reads as one run of tokens without a copy.

    Attributes:
        keys, values: ``[num_blocks, block_size, num_kv_heads, head_dim]``.
    """

    keys: Tensor
    values: Tensor

    @property
    def num_kv_heads(self) -> int:
        return self.keys.shape[2]

    def write(self, key: Tensor, value: Tensor, slots: Tensor) -> None:
        """Store ``[T, num_kv_heads, head_dim]`` keys and values at ``[T]`` slots (block x block_size + offset)."""
        self.keys.view(-1, *self.keys.shape[2:]).index_copy_(0, slots, key)
        self.values.view(-1, *self.values.shape[2:]).index_copy_(0, slots, value)


class KVCache:
    """The pools of all layers of one model.

    Args:
        num_layers: layers that attend.
        num_blocks: blocks per layer; the pool never grows.
        block_size: tokens per block.

    Raises:
        ValueError: if a size is not positive.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a cache needs at least one block of one token, got {num_blocks} x {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        # zeros, not empty: masked slots are multiplied by probability 0, and 0 * NaN is NaN
        shape = (num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim)
        self._pool = torch.zeros(shape, dtype=dtype, device=device)
        self._layers = [LayerCache(keys, values) for keys, values in self._pool]

    def layer(self, index: int) -> LayerCache:
        return self._layers[index]

    def clear(self, block_ids: Sequence[int]) -> None:
        """Zero blocks of every layer: what a failed request may have left (NaN) must not reach the next owner."""
        if block_ids:
            self._pool[:, :, list(block_ids)] = 0

    @property
    def num_bytes(self) -> int:
        return self._pool.numel() * self._pool.element_size()

    @staticmethod
    def bytes_per_block(
        num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype = torch.float32
    ) -> int:
        return num_layers * 2 * block_size * num_kv_heads * head_dim * dtype.itemsize
