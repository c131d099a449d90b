"""Prompt lookup: propose what followed the last occurrence of the newest tokens. Needs no model and gives no law.

Saxena 2023 (prompt lookup decoding); the longest matching suffix wins, and of its occurrences the most recent.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from trimtab.drafters.base import DraftBatch, DraftSampler
from trimtab.models.executor import ModelExecutor

DEFAULT_NUM_POSITIONS = 5
ITEM_SIZE = 4  # bytes of a token id


class NgramDrafter:
    """Drafts out of the request's own history.

    Args:
        num_positions: most tokens to propose.
        lookup_min, lookup_max: lengths of the suffix to find.
    """

    name = "ngram"
    taps: tuple[int, ...] = ()
    vocab_map: Tensor | None = None
    autoregressive = False
    max_position = 1 << 60

    def __init__(self, num_positions: int, lookup_min: int, lookup_max: int) -> None:
        self.num_positions = num_positions
        self.lookup_min, self.lookup_max = lookup_min, lookup_max

    def propose(self, batch: DraftBatch, sampler: DraftSampler) -> None:
        """Look up every drafting request."""
        drafting = batch.drafting
        if drafting:
            sampler.propose([self._lookup(batch.histories[row], batch.max_drafts[row]) for row in drafting])

    def _lookup(self, history: Sequence[int], limit: int) -> list[int]:
        start = find_suffix(history, self.lookup_min, self.lookup_max)
        return [] if start is None else list(history[start : start + min(limit, self.num_positions)])


def find_suffix(history: Sequence[int], shortest: int, longest: int) -> int | None:
    """Where the text goes on after the most recent earlier occurrence of the longest repeated suffix.

    Returns:
        Index of the token after that occurrence, or None if no suffix of ``shortest`` to ``longest`` tokens repeats.
    """
    data = array("i", history).tobytes()
    for length in range(min(longest, len(history) - 1), shortest - 1, -1):
        suffix = data[-length * ITEM_SIZE :]
        end = len(data) - ITEM_SIZE  # an occurrence must leave a token to go on with
        while (at := data.rfind(suffix, 0, end)) >= 0:
            if at % ITEM_SIZE == 0:
                return at // ITEM_SIZE + length
            end = at + len(suffix) - 1  # bytes matched across token borders
    return None


def build(speculative: Any, target: ModelExecutor) -> NgramDrafter:
    """From ``num_speculative_tokens``, ``prompt_lookup_min`` and ``prompt_lookup_max``."""
    num_positions = speculative.num_speculative_tokens or DEFAULT_NUM_POSITIONS
    return NgramDrafter(num_positions, speculative.prompt_lookup_min, speculative.prompt_lookup_max)
