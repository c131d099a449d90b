"""Draws drafts from each request's own law and records that law, so that verification uses exactly it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trimtab.engine.sampling import RowSettings, adjust_logits, argmax, draw, restrict_probs
from trimtab.policy import FEATURES, draft_features, split_features

if TYPE_CHECKING:
    from trimtab.engine.request import Request

CERTAIN = 40.0  # log-odds of a draft that was drawn from no distribution


class DraftError(RuntimeError):
    """A drafter gave something that can not be a draft."""


@dataclass(slots=True)
class DraftRound:
    """What one round of drafting recorded; R' requests drafted.

    Attributes:
        features: ``[R', K, d]`` float32 features of the draft distributions.
        drawn_probs: ``[R', K]`` probability with which each token was drawn.
        head_logits: ``[R', K]``, if the drafter has a confidence head.
        probs: per position ``[R', draft_vocab_size]``; None: each draft was certain.
        vocab_map: ``[draft_vocab_size]`` int64 target ids; None: same vocabulary.
    """

    features: Tensor
    drawn_probs: Tensor
    head_logits: Tensor | None = None
    probs: list[Tensor | None] = field(default_factory=list)
    vocab_map: Tensor | None = None


@dataclass(frozen=True, slots=True)
class RequestDraft:
    """One request's part of a round: its tokens (target ids) and its row."""

    tokens: list[int]
    round: DraftRound
    row: int


class RequestDraftLaw:
    """The draft laws of some requests, over a target vocabulary of ``vocab_size`` ids."""

    def __init__(self, drafts: Sequence[RequestDraft | None], vocab_size: int) -> None:
        self._drafts = drafts
        self._vocab_size = vocab_size

    def full(self, requests: Sequence[int], position: int) -> Tensor:
        """``[n, vocab_size]`` draft distributions of some requests at one position."""
        rows = torch.zeros(len(requests), self._vocab_size)
        for row, request in zip(rows, requests, strict=True):
            draft = self._drafts[request]
            assert draft is not None
            probs = draft.round.probs[position]
            if probs is None:
                row[draft.tokens[position]] = 1.0
            elif draft.round.vocab_map is None:
                row[: probs.shape[1]] = probs[draft.row]
            else:
                row[draft.round.vocab_map] = probs[draft.row]
        return rows


class Sampler:
    """The `DraftSampler` of one round.

    Args:
        requests: the R' requests that draft.
        limits: ``[R']`` most drafts of each; what is drawn beyond is dropped.
        depth: positions of this round.
        num_positions: K, positions that records have room for.
        num_ids: ids from here on are no tokens and are never drawn.
        feature_names: distribution features to record; may be empty.
        vocab_map: ``[draft_vocab_size]`` int64 ids below `num_ids`, or None.
        certain: draw the most likely token and verify it as certain ("greedy" drafts).
    """

    def __init__(
        self,
        requests: Sequence[Request],
        limits: Sequence[int],
        depth: int,
        num_positions: int,
        num_ids: int,
        feature_names: Sequence[str],
        vocab_map: Tensor | None,
        certain: bool,
    ) -> None:
        self._requests, self._limits, self._depth, self._num_ids = requests, limits, depth, num_ids
        self._names = tuple(feature_names)
        self._settings = RowSettings.of([request.params for request in requests])
        self._certain = certain or bool((self._settings.temperature == 0).all())
        self._altered = [row for row, request in enumerate(requests) if request.params.alters_target]
        shape = (len(requests), num_positions)
        self._round = DraftRound(
            torch.zeros(*shape, len(self._names)), torch.ones(shape), None, [], None if certain else vocab_map
        )
        self._vocab_map = vocab_map
        self._columns: list[Tensor] = []  # target ids drawn at each position
        self._tokens: list[list[int]] | None = None

    @property
    def depth(self) -> int:
        return self._depth

    def sample(self, logits: Tensor, position: int, head_logits: Tensor | None = None) -> Tensor:
        """Draw one position of every row; see `trimtab.drafters.base.DraftSampler`.

        Raises:
            DraftError: rows that do not fit, or without a finite largest logit.
        """
        if position != len(self._columns) or position >= self._depth or logits.shape[0] != len(self._requests):
            raise DraftError(
                f"logits {list(logits.shape)} at position {position}; expected [{len(self._requests)}, V] at "
                f"position {len(self._columns)} of {self._depth}"
            )
        logits = self._usable(logits)
        best = argmax(logits)
        if not bool(torch.isfinite(logits.gather(1, best[:, None])).all()):
            raise DraftError("draft logits are not finite")
        probs = torch.empty_like(logits)
        if self._names or not self._certain:  # one softmax serves the features and the draw
            names = self._names or ("logit_q_max",)
            features = draft_features(logits, self._settings.softmax_temperature, names, probs_out=probs)
            self._round.features[:, position] = features[:, : len(self._names)]
        if self._certain:
            drawn = best
            self._round.probs.append(None)
        else:
            restrict_probs(probs, self._settings)
            uniforms = torch.tensor([r.draws.draw(1)[0] for r in self._requests], dtype=torch.float64)
            drawn = draw(probs, uniforms)
            self._round.drawn_probs[:, position] = probs.gather(1, drawn[:, None]).squeeze(1)
            self._round.probs.append(probs)
        if head_logits is not None:
            if self._round.head_logits is None:
                self._round.head_logits = torch.zeros_like(self._round.drawn_probs)
            self._round.head_logits[:, position] = head_logits.float()
        tokens = drawn if self._vocab_map is None else self._vocab_map[drawn]
        self._columns.append(tokens)
        return tokens

    def propose(self, token_ids: Sequence[Sequence[int]]) -> None:
        """Take whole drafts that were drawn from no distribution."""
        if len(token_ids) != len(self._requests):
            raise DraftError(f"{len(token_ids)} drafts for {len(self._requests)} requests")
        self._tokens = [list(tokens[: self._depth]) for tokens in token_ids]
        longest = max((len(tokens) for tokens in self._tokens), default=0)
        self._round.features[:] = CERTAIN
        for column, name in enumerate(self._names):
            if FEATURES[name].name in ("log_q_max", "entropy"):
                self._round.features[:, :, column] = 0.0
        self._round.probs = [None] * longest

    def drafts_to_host(self) -> list[RequestDraft | None]:
        """``[R']`` what each request has drafted.

        Raises:
            DraftError: a token outside the vocabulary.
        """
        tokens = self._tokens
        if tokens is None:
            tokens = torch.stack(self._columns, dim=1).tolist() if self._columns else [[] for _ in self._requests]
        drafts: list[RequestDraft | None] = []
        for row, (ids, limit) in enumerate(zip(tokens, self._limits, strict=True)):
            kept = ids[:limit]
            if any(not 0 <= token < self._num_ids for token in kept):
                raise DraftError(f"drafted tokens {kept} are outside 0..{self._num_ids - 1}")
            drafts.append(RequestDraft(kept, self._round, row) if kept else None)
        return drafts

    def _usable(self, logits: Tensor) -> Tensor:
        """Float32 logits of real tokens, with what each request adds to the target's."""
        logits = logits.float()
        if self._vocab_map is None:
            logits = logits[:, : self._num_ids].contiguous()
        if self._altered:
            logits = logits.clone()
        for row in self._altered:
            request = self._requests[row]
            tokens = request.tokens + [int(column[row]) for column in self._columns]
            full = logits[row]
            if self._vocab_map is not None:
                full = torch.full((self._num_ids,), float("-inf")).scatter_(0, self._vocab_map, logits[row])
            full = adjust_logits(full, request.params, tokens, request.prompt_len, request.stop_ids)
            logits[row] = full if self._vocab_map is None else full[self._vocab_map]
        return logits


def distribution_features(names: Sequence[str]) -> tuple[str, ...]:
    """Features to record for a source that wants ``names``: its own and ``logit_q_max``, which gives q_max."""
    distribution, _ = split_features(names)
    return distribution if "logit_q_max" in distribution else (*distribution, "logit_q_max")
