"""What a drafter is: it reads what the target just committed and proposes tokens through a sampler.

The engine owns everything that losslessness depends on (sampling, draft distributions, features); a drafter only
turns committed tokens and target features into draft logits. It draws through :class:`DraftSampler`, so the law a
draft was sampled from is recorded in one place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor


@dataclass(frozen=True, slots=True)
class DraftBatch:
    """What R requests committed since the drafter last saw them; ``T = sum(num_new)`` positions in all.

    A drafter's cache uses the target's block tables, so prefix caching and preemption hold for both.
    """

    request_ids: Sequence[str]  # [R]
    num_new: Sequence[int]  # [R] committed positions handed over now (at least 1)
    start_positions: Sequence[int]  # [R] position of the first of them
    token_ids: Tensor  # [T] int64, the token at each committed position
    next_token_ids: Tensor  # [T] int64, the token after it (the last one is the newly emitted token)
    features: Tensor | None  # [T, num_taps * hidden_size] target hidden states at `Drafter.taps`, if any are tapped
    block_tables: Sequence[Sequence[int]]  # [R] cache blocks, room for every committed and every drafted position
    max_drafts: Sequence[int]  # [R] at most this many drafts; 0: only advance the drafter's state
    histories: Sequence[Sequence[int]]  # [R] every known token of the request, the newly emitted one last

    @property
    def drafting(self) -> list[int]:
        """Indices of the requests that draft in this round, in order; the R' rows that a sampler sees."""
        return [row for row, limit in enumerate(self.max_drafts) if limit > 0]


class DraftSampler(Protocol):
    """Draws draft tokens by each request's own sampling settings and keeps the law they were drawn from."""

    @property
    def depth(self) -> int:
        """How many positions to draft in this round (decided before any token of the round was drawn)."""
        ...

    def sample(self, logits: Tensor, position: int, head_logits: Tensor | None = None) -> Tensor:
        """Draw draft position ``position`` of every drafting request.

        Args:
            logits: ``[R', draft_vocab_size]`` draft logits, any float dtype.
            position: draft position, 0-based; called in order, at most once each.
            head_logits: ``[R']`` logits of a trained confidence head for this slot, if the drafter has one.

        Returns:
            ``[R']`` int64 drawn tokens as ids of the *target* vocabulary.
        """
        ...

    def propose(self, token_ids: Sequence[Sequence[int]]) -> None:
        """Hand over whole drafts that were drawn from no distribution (one-hot), one list per drafting request."""
        ...


@runtime_checkable
class Drafter(Protocol):
    """A drafter kind. Attributes are read by the engine at start; ``propose`` runs once per step."""

    name: str
    num_positions: int  # K, the most tokens it can draft
    taps: tuple[int, ...]  # indices into the target's hidden_states (0 = embeddings, i = output of layer i)
    vocab_map: Tensor | None  # [draft_vocab_size] int64 target id of each draft id; None: same vocabulary
    autoregressive: bool  # each further position costs another pass, so a draft may stop early
    max_position: int  # positions at or past this can not be drafted

    def propose(self, batch: DraftBatch, sampler: DraftSampler) -> None:
        """Advance over the committed positions and draft through ``sampler``."""
        ...
