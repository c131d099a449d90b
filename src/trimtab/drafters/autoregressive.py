"""Serving of drafters that predict one position per pass (EAGLE, EAGLE-3, MTP).

Every round first runs over the positions that were just committed, with the target's own hidden states: that
overwrites whatever the drafter wrote there from its guesses. Then it continues on its own states.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trimtab.drafters.base import DraftBatch, DraftSampler
from trimtab.drafters.checkpoint import DraftCheckpoint
from trimtab.drafters.networks import AutoregressiveNetwork
from trimtab.drafters.paged import DraftCache
from trimtab.models.executor import ModelExecutor


class AutoregressiveDrafter:
    """Serves an :class:`AutoregressiveNetwork`."""

    autoregressive = True

    def __init__(
        self, checkpoint: DraftCheckpoint, network: AutoregressiveNetwork, target: ModelExecutor, num_positions: int
    ) -> None:
        shape = network.shape
        self.name = shape.kind
        self.network, self.num_positions = network, num_positions
        self.taps = shape.taps
        self.vocab_map = checkpoint.vocab_map
        self.max_position = shape.max_position
        self.cache = DraftCache(shape.num_layers * shape.num_modules, shape.num_kv_heads, shape.head_dim, target)
        self.normalize = target.final_norm if checkpoint.features_after_norm else None

    @torch.inference_mode()
    def propose(self, batch: DraftBatch, sampler: DraftSampler) -> None:
        assert batch.features is not None
        features = batch.features.to(self.cache.dtype)
        if self.normalize is not None:
            features = self.normalize(features)
        network = self.network
        placement = self.cache.place(batch)
        attend = self.cache.attend(batch.num_new, batch.start_positions, batch.block_tables)
        hidden = network.advance(batch.next_token_ids, network.fuse(features), placement.positions, attend, 0)
        drafting = batch.drafting
        depth = min(sampler.depth, self.num_positions) if drafting else 0
        if depth == 0:
            return
        last = placement.last_rows[drafting]
        tokens = sampler.sample(network.logits(network.head_input(hidden[last])), 0)
        if network.shape.num_modules > 1:
            self._draft_by_modules(batch, hidden, tokens, sampler, depth)
            return
        states, positions = network.recycle(hidden[last]), placement.positions[last]
        self._continue(batch, states, tokens, positions, sampler, range(1, depth))

    def _continue(
        self,
        batch: DraftBatch,
        states: Tensor,
        tokens: Tensor,
        positions: Tensor,
        sampler: DraftSampler,
        steps: range,
    ) -> None:
        """One row per drafting request and step, from the drafter's own states."""
        network = self.network
        tables = [batch.block_tables[row] for row in batch.drafting]
        first = positions.tolist()
        for step in steps:
            # a request with fewer drafts left has no room here: what it draws past them is dropped
            at = [min(a + step, len(t) * self.cache.block_size - 1) for a, t in zip(first, tables, strict=True)]
            attend = self.cache.attend([1] * len(at), at, tables)
            hidden = network.advance(tokens, states, positions + step, attend, step)
            tokens = sampler.sample(network.logits(network.head_input(hidden)), step)
            states = network.recycle(hidden)

    def _draft_by_modules(
        self, batch: DraftBatch, hidden: Tensor, tokens: Tensor, sampler: DraftSampler, depth: int
    ) -> None:
        """One module per draft position: module k reads module k-1's states over the same rows, one position later.

        A module's entries at the last rows of a round hold drafted tokens and stay; they lie behind the true ones that
        the next round writes, and change what is drafted, never what is emitted.
        """
        network, drafting = self.network, batch.drafting
        rows = torch.split(torch.arange(len(hidden)), list(batch.num_new))
        kept = torch.cat([rows[row] for row in drafting])
        lengths = [batch.num_new[row] for row in drafting]
        starts = [batch.start_positions[row] for row in drafting]
        tables = [batch.block_tables[row] for row in drafting]
        known = [batch.next_token_ids[rows[row]] for row in drafting]
        ends = torch.tensor(lengths).cumsum(0) - 1
        states = network.recycle(hidden[kept])
        for step in range(1, min(depth, network.shape.num_modules)):
            known = [torch.cat([ids[1:], token.view(1)]) for ids, token in zip(known, tokens, strict=True)]
            at = [start + step for start in starts]
            positions = torch.cat([torch.arange(a, a + n) for a, n in zip(at, lengths, strict=True)])
            attend = self.cache.attend(lengths, at, tables)
            hidden = network.advance(torch.cat(known), states, positions, attend, step)
            states = network.recycle(hidden)
            tokens = sampler.sample(network.logits(network.head_input(hidden[ends])), step)
        last = torch.tensor([start + length - 1 for start, length in zip(starts, lengths, strict=True)])
        self._continue(batch, states[ends], tokens, last, sampler, range(network.shape.num_modules, depth))
