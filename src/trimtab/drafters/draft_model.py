"""A smaller model with the same tokenizer drafts token by token, in a cache of its own under the target's block tables.

It keeps no state beside that cache: each round reads every position committed since the last one, which overwrites
what rejected drafts left behind.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trimtab.drafters.base import DraftBatch, DraftSampler
from trimtab.models.executor import ForwardBatch, ModelExecutor
from trimtab.models.loader import load_model

DEFAULT_NUM_POSITIONS = 4


class VocabularyMismatchError(ValueError):
    """Draft and target do not share a tokenizer."""


class DraftModelDrafter:
    """Serves a causal language model as drafter.

    Args:
        executor: of the draft model, with as many cache blocks as the target.
        num_positions: K.
    """

    name = "draft_model"
    taps: tuple[int, ...] = ()
    vocab_map: Tensor | None = None
    autoregressive = True

    def __init__(self, executor: ModelExecutor, num_positions: int) -> None:
        self.executor = executor
        self.num_positions = num_positions
        self.max_position = executor.info.max_model_len

    @torch.inference_mode()
    def propose(self, batch: DraftBatch, sampler: DraftSampler) -> None:
        """Read what was committed and the newest token after it, then draft from there."""
        drafting = batch.drafting
        depth = min(sampler.depth, self.num_positions) if drafting else 0
        token_ids: list[Tensor] = []
        lengths: list[int] = []
        last_rows: list[int] = []
        row = 0
        for index, count in enumerate(batch.num_new):
            token_ids.append(batch.token_ids[row : row + count])
            if depth and batch.max_drafts[index] > 0:  # only then is there a token that the target has not read
                token_ids.append(batch.next_token_ids[row + count - 1 : row + count])
                count += 1
                last_rows.append(sum(lengths) + count - 1)
            lengths.append(count)
            row += batch.num_new[index]
        logits = self._forward(torch.cat(token_ids), lengths, batch.start_positions, batch.block_tables, last_rows)
        if depth == 0:
            return
        tables = [batch.block_tables[index] for index in drafting]
        positions = [batch.start_positions[index] + lengths[index] for index in drafting]
        tokens = sampler.sample(logits, 0)
        for step in range(1, depth):
            contexts = [position + step - 1 for position in positions]
            logits = self._forward(tokens, [1] * len(tables), contexts, tables, range(len(tables)))
            tokens = sampler.sample(logits, step)

    def _forward(self, token_ids: Tensor, lengths: Any, contexts: Any, tables: Any, rows: Any) -> Tensor:
        wanted = torch.tensor(list(rows), dtype=torch.int64)
        return self.executor.forward(ForwardBatch(token_ids, lengths, contexts, tables, wanted)).logits


def build(speculative: Any, target: ModelExecutor) -> DraftModelDrafter:
    """Load the model that ``speculative.model`` names.

    Raises:
        ValueError: if no model is named.
        VocabularyMismatchError: if its tokenizer is not the target's.
    """
    if speculative.model is None:
        raise ValueError('method "draft_model" needs "model": a smaller model with the target\'s tokenizer')
    loaded = load_model(speculative.model, target.loaded.dtype, target.device.type)
    check_vocabulary(target.loaded.tokenizer, loaded.tokenizer, speculative.model)
    executor = ModelExecutor(loaded, target.cache.num_blocks, target.block_size)
    return DraftModelDrafter(executor, speculative.num_speculative_tokens or DEFAULT_NUM_POSITIONS)


def check_vocabulary(target: Any, draft: Any, name: str) -> None:
    """Both must mean the same by every id; rows that pad an embedding beyond the tokenizer do not matter.

    Raises:
        VocabularyMismatchError: naming both sizes and the first id that differs.
    """
    ours, theirs = target.get_vocab(), draft.get_vocab()
    if ours == theirs:
        return
    differing = [id_ for token, id_ in ours.items() if theirs.get(token) != id_] or [len(ours)]
    raise VocabularyMismatchError(
        f'draft model "{name}" has a vocabulary of {len(theirs)} tokens, the target of {len(ours)}; they differ '
        f"from id {min(differing)} on. Use a draft model with the target's tokenizer"
    )
