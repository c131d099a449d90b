"""Who computes how many tokens in the next step: admission, chunked prefill, preemption by recompute, abort.

Decoding requests come first, oldest first; what they leave of the step's tokens goes to drafts and prefill.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

from trimtab.engine.block_pool import BlockPool, extend_hashes
from trimtab.engine.request import FinishReason, Request, RequestState


@dataclass(slots=True)
class ScheduledRequest:
    """``num_tokens`` known tokens of a request to compute, and after them ``num_drafts`` of its drafts."""

    request: Request
    num_tokens: int
    num_drafts: int = 0

    @property
    def produces(self) -> bool:
        """Whether the step gives it a new token."""
        return self.request.num_computed + self.num_tokens == len(self.request.tokens)


@dataclass(slots=True)
class Schedule:
    """One step.

    Attributes:
        max_drafts: draft slots that fit into the step beside the known tokens.
    """

    requests: list[ScheduledRequest] = field(default_factory=list)
    max_drafts: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(scheduled.num_tokens for scheduled in self.requests)


class Scheduler:
    """Requests that wait and requests that run, over one block pool.

    Args:
        max_model_len: the pool must hold one request of this length.
        num_draft_positions: K, room that a decoding request keeps beyond its known tokens.
        hash_lookahead: tokens after a block that its content depends on (1 for drafters that read the next token).
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        num_draft_positions: int = 0,
        hash_lookahead: int = 0,
    ) -> None:
        self.pool = pool
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.num_draft_positions = num_draft_positions
        self.hash_lookahead = hash_lookahead
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # oldest first
        self.num_preemptions = 0
        self.num_cached_tokens = 0

    @property
    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def schedule(self) -> Schedule:
        """Choose the next step and give its requests the blocks they need."""
        chosen: dict[int, ScheduledRequest] = {}
        budget = self._schedule_decodes(chosen)
        num_flexible = sum(r.num_drafts for r in self._flexible(chosen))
        has_prefill = bool(self.waiting) or any(r.num_to_prefill > 0 for r in self.running)
        reserve = min(num_flexible, budget // 2 if has_prefill else budget)
        self._schedule_prefills(chosen, budget - reserve)
        num_pinned = sum(s.request.num_drafts for s in chosen.values() if s.request.reproducible)
        return Schedule(list(chosen.values()), num_pinned + reserve)

    def _flexible(self, chosen: dict[int, ScheduledRequest]) -> list[Request]:
        return [s.request for s in chosen.values() if not s.request.reproducible]

    def _schedule_decodes(self, chosen: dict[int, ScheduledRequest]) -> int:
        budget = self.max_num_batched_tokens
        for request in list(self.running):
            if request.state is not RequestState.RUNNING or request.num_to_prefill > 0:
                continue
            cost = 1 + (request.num_drafts if request.reproducible else 0)
            room = len(request.tokens) + request.num_drafts + 1 + self.num_draft_positions
            if cost <= budget and self._grow(request, room, chosen):
                chosen[id(request)] = ScheduledRequest(request, 1)
                budget -= cost
        return budget

    def _schedule_prefills(self, chosen: dict[int, ScheduledRequest], budget: int) -> None:
        for request in list(self.running):
            if budget <= 0:
                return
            if request.state is RequestState.RUNNING and request.num_to_prefill > 0:
                budget -= self._schedule_chunk(request, budget, chosen)
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            request = self.waiting[0]
            if not self._admit(request):
                return
            self.waiting.popleft()
            if request.num_to_prefill > 0:
                used = self._schedule_chunk(request, budget, chosen)
                if used == 0:
                    return
                budget -= used

    def _schedule_chunk(self, request: Request, budget: int, chosen: dict[int, ScheduledRequest]) -> int:
        count = min(request.num_to_prefill, budget)
        end = request.num_computed + count
        drafts_next = end >= len(request.tokens) - 1
        room = len(request.tokens) + 1 + self.num_draft_positions if drafts_next else end
        if not self._grow(request, room, chosen):
            return 0
        chosen[id(request)] = ScheduledRequest(request, count)
        return count

    def _admit(self, request: Request) -> bool:
        """Take a waiting request in if its known tokens fit without preempting anyone."""
        extend_hashes(request.block_hashes, request.tokens, self.block_size, self.hash_lookahead)
        most = (len(request.tokens) - 1) // self.block_size  # at least one token is left to compute
        request.block_table = self.pool.match_prefix(request.block_hashes[:most])
        room = len(request.tokens) + 1 + self.num_draft_positions
        if self._num_missing(request, room) > self.pool.num_available:
            self.pool.release(request.block_table)
            request.block_table = []
            return False
        cached = len(request.block_table) * self.block_size
        request.num_computed = request.num_drafter_seen = cached
        request.num_remembered = len(request.block_table)
        request.state = RequestState.RUNNING
        request.metrics.num_cached_tokens += cached
        self.num_cached_tokens += cached
        if request.metrics.scheduled is None:
            request.metrics.scheduled = time.monotonic()
        self.running.append(request)
        return True

    def _num_missing(self, request: Request, num_positions: int) -> int:
        return -(-min(num_positions, self.max_model_len) // self.block_size) - len(request.block_table)

    def _grow(self, request: Request, num_positions: int, chosen: dict[int, ScheduledRequest]) -> bool:
        """Give a request blocks for so many positions, preempting the youngest; False if it was the youngest."""
        missing = self._num_missing(request, num_positions)
        if missing <= 0:
            return True
        while (blocks := self.pool.allocate(missing)) is None:
            victim = self.running[-1]
            self.preempt(victim)
            chosen.pop(id(victim), None)
            if victim is request:
                return False
        request.block_table += blocks
        return True

    def preempt(self, request: Request) -> None:
        """Take a running request's blocks; it waits first in line and recomputes. Its draft stays valid."""
        self.running.remove(request)
        self._release(request)
        request.state = RequestState.WAITING
        request.metrics.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(request)

    def finish(self, request: Request, reason: FinishReason) -> list[int]:
        """Take a request out for good.

        Returns:
            Blocks that must be cleared, if it failed: nobody reads them any more and nothing will.
        """
        if request.state is RequestState.RUNNING:
            self.running.remove(request)
        elif request.state is RequestState.WAITING:
            self.waiting.remove(request)
        freed = self._release(request, forget=reason == "error")
        request.state = RequestState.FINISHED
        request.finish_reason = reason
        request.draft = None
        request.metrics.finished = time.monotonic()
        return freed

    def _release(self, request: Request, forget: bool = False) -> list[int]:
        freed = self.pool.release(request.block_table, forget)
        request.block_table = []
        request.features = []
        request.num_computed = request.num_drafter_seen = request.num_remembered = 0
        return freed

    def remember(self, request: Request, num_positions: int) -> None:
        """Let other requests find the full blocks among the first ``num_positions`` computed positions."""
        full = num_positions // self.block_size
        if full <= request.num_remembered:
            return
        extend_hashes(request.block_hashes, request.tokens, self.block_size, self.hash_lookahead)
        full = min(full, len(request.block_hashes))
        for index in range(request.num_remembered, full):
            self.pool.remember(request.block_table[index], request.block_hashes[index])
        request.num_remembered = max(request.num_remembered, full)
