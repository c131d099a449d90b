"""A request on its way through the engine, and what the engine says about it."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

import torch
from torch import Tensor

from trimtab.engine.detokenizer import Detokenizer
from trimtab.engine.drafting import RequestDraft
from trimtab.engine.sampling_params import SamplingParams
from trimtab.policy import RecentAcceptance

FinishReason = Literal["stop", "length", "abort", "error"]


class RequestState(Enum):
    """Where a request is."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probabilities of the target at one output token, before temperature and truncation.

    Attributes:
        top: alternatives, most likely first, as (token id, log-probability).
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class RequestMetrics:
    """Times in seconds of `time.monotonic`; counts of draft slots, which trimming makes three different numbers."""

    arrival: float = field(default_factory=time.monotonic)
    scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None
    num_drafted: int = 0
    num_verified: int = 0
    num_accepted: int = 0
    num_spec_steps: int = 0  # decode steps in which at least one slot was verified
    num_decode_steps: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    accepted_histogram: Counter[int] = field(default_factory=Counter)
    accepted_by_verified: Counter[tuple[int, int]] = field(default_factory=Counter)  # (verified, accepted)

    @property
    def acceptance_length(self) -> float:
        """Tokens per decode step, the bonus or recovered token included."""
        return 1.0 + self.num_accepted / self.num_decode_steps if self.num_decode_steps else 1.0


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What one step added to one request.

    Attributes:
        text: new text; text that may still turn out to be part of a stop string is held back.
        token_ids: new tokens (the stop token included, as in vLLM's token ids).
        error: why a request failed, if finish_reason is "error".
    """

    request_id: str
    index: int  # which of the n completions
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None
    finish_reason: FinishReason | None
    metrics: RequestMetrics
    num_prompt_tokens: int
    error: str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


class DrawCounter:
    """A request's uniforms, keyed by how many were drawn before: the same alone and in any batch.

    Keyed by a counter and never by position: noise that is used twice would carry what a rejected draft was into the
    next decision (DESIGN section 5).
    """

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed % (1 << 63))
        self._buffer: list[float] = []
        self.num_drawn = 0

    def draw(self, count: int) -> list[float]:
        """The next ``count`` uniforms in [0, 1)."""
        self.num_drawn += count
        while len(self._buffer) < count:
            self._buffer.extend(torch.rand(64, generator=self._generator, dtype=torch.float64).tolist())
        drawn, self._buffer = self._buffer[:count], self._buffer[count:]
        return drawn


@dataclass(slots=True, eq=False)
class Request:
    """One sequence that is being generated.

    Attributes:
        request_id: what the caller knows it by; the n completions of one prompt share it.
        tokens: prompt and output so far.
        max_len: most tokens, prompt included.
        key: stable number for the policy's hashes.
        stop_ids: tokens that end the output.
        num_computed: tokens whose keys and values are in the cache.
        block_table: cache blocks owned, in order; the first `num_remembered` are known to the prefix cache.
        draft: drafted tokens that wait for verification.
        num_drafter_seen: committed positions that the drafter has been given.
        features: target features of positions from `num_drafter_seen` on, one chunk per step.
        can_draft: False once the drafter can not follow the request any more.
    """

    request_id: str
    index: int
    prompt_len: int
    params: SamplingParams
    tokens: list[int]
    draws: DrawCounter
    max_len: int
    key: int
    stop_ids: tuple[int, ...]
    detokenizer: Detokenizer
    state: RequestState = RequestState.WAITING
    num_computed: int = 0
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    num_remembered: int = 0
    draft: RequestDraft | None = None
    num_drafter_seen: int = 0
    features: list[Tensor] = field(default_factory=list)
    can_draft: bool = True
    recent: RecentAcceptance = field(default_factory=RecentAcceptance)
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    finish_reason: FinishReason | None = None
    error: str | None = None

    @property
    def num_drafts(self) -> int:
        return len(self.draft.tokens) if self.draft is not None else 0

    @property
    def reproducible(self) -> bool:
        """Seeded and sampled: always drafted and verified in full, so that its draws do not depend on the batch."""
        return self.params.seed is not None and not self.params.is_greedy

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def num_to_prefill(self) -> int:
        """Known tokens to compute before it can decode: the whole prompt at first, all but the last when it resumes."""
        return len(self.tokens) - (self.num_output > 0) - self.num_computed

    @property
    def room(self) -> int:
        """How many more tokens it may emit."""
        return self.max_len - len(self.tokens)


def seed_for(request_id: str, params: SamplingParams, engine_seed: int) -> int:
    """The seed of a request's draws: its own if it gave one, else from the engine's seed and its id."""
    if params.seed is not None:
        return params.seed
    digest = hashlib.sha256(f"{engine_seed}:{request_id}".encode()).digest()
    return int.from_bytes(digest[:7], "little")
