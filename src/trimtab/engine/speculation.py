"""The engine's side of speculation: what the policy is asked, what it is told, and what the drafter is given."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trimtab.drafters import DraftBatch, Drafter, make_drafter
from trimtab.engine.config import EngineConfig, SpeculativeConfig
from trimtab.engine.drafting import DraftError, RequestDraft, Sampler, distribution_features
from trimtab.engine.request import Request
from trimtab.engine.scheduler import Schedule, ScheduledRequest
from trimtab.engine.stats import Counters, PolicyStats
from trimtab.models.executor import ModelExecutor
from trimtab.policy import (
    ConfidenceSource,
    DraftSignals,
    Exploration,
    VerificationOutcome,
    assemble_features,
    make_confidence,
    survival_probs,
)
from trimtab.policy.cost import CostCurve
from trimtab.policy.planner import PlanInput, Planner, PlannerHistory, make_planner, update_history

log = logging.getLogger(__name__)

MAX_PENDING = 1024  # committed positions that a request may keep for a drafter that does not come
MAX_PAUSE = 256  # steps without drafts after repeated failures


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What one step planned: rows are the scheduled requests that had a draft."""

    rows: list[int]  # indices into the schedule
    requests: list[Request]
    num_verified: list[int]
    signals: DraftSignals


class Speculation:
    """A drafter, a confidence source, a planner and a cost curve, and the state between their steps."""

    def __init__(
        self,
        drafter: Drafter,
        config: SpeculativeConfig,
        source: ConfidenceSource,
        planner: Planner,
        cost: CostCurve,
        num_ids: int,
        max_model_len: int,
        seed: int = 0,
    ) -> None:
        self.drafter, self.config, self.source, self.planner, self.cost = drafter, config, source, planner, cost
        self.num_positions = drafter.num_positions
        self.num_ids, self.max_model_len = num_ids, max_model_len
        self.history = PlannerHistory.start(self.num_positions)
        self.exploration = Exploration(config.exploration, seed)
        self.feature_names = () if source.name == "fixed" else distribution_features(source.feature_names)
        self._record: StepRecord | None = None
        self._failures = 0
        self._pause = 0

    @classmethod
    def start(cls, config: EngineConfig, executor: ModelExecutor, num_ids: int, max_model_len: int) -> Speculation:
        """Make everything that the settings name.

        Raises:
            ValueError: for a drafter, source or planner that does not exist or does not fit.
        """
        speculative = config.speculative_config
        assert speculative is not None
        adaptive = speculative.enable_adaptive_verification
        if adaptive and not executor.supports_variable_length:
            raise ValueError(
                "this attention backend verifies the same number of drafts for every request; "
                "set enable_adaptive_verification to false"
            )
        drafter = make_drafter(speculative, executor)
        if drafter.vocab_map is not None and int(drafter.vocab_map.max()) >= num_ids:
            raise ValueError(
                f"the drafter's vocabulary holds id {int(drafter.vocab_map.max())}, the tokenizer has {num_ids}"
            )
        executor.set_taps(drafter.taps)
        source_name = (speculative.confidence or "estimator") if adaptive else "fixed"
        source = make_confidence(source_name, drafter.num_positions)
        planner = (
            make_planner(*([speculative.planner] if speculative.planner else [])) if adaptive else make_planner("fixed")
        )
        cost = CostCurve.linear(20.0, 1.0)
        return cls(drafter, speculative, source, planner, cost, num_ids, max_model_len, config.seed)

    # plan

    def plan(self, schedule: Schedule) -> None:
        """Decide how many drafts of each scheduled request are verified."""
        rows = [i for i, s in enumerate(schedule.requests) if s.produces and s.request.draft is not None]
        if not rows:
            self._record = None
            return
        requests = [schedule.requests[i].request for i in rows]
        drafts = [request.draft for request in requests if request.draft is not None]
        num_drafted = torch.tensor([len(draft.tokens) for draft in drafts])
        signals = self._signals(requests, drafts, num_drafted)
        survival = survival_probs(self.source.confidence(signals), num_drafted)
        counts = self._admit(schedule, requests, survival.numpy(), num_drafted.numpy())
        for row, count in zip(rows, counts, strict=True):
            schedule.requests[row].num_drafts = count
        self._record = StepRecord(rows, requests, counts, signals)

    def _admit(self, schedule: Schedule, requests: list[Request], survival: Any, num_drafted: Any) -> list[int]:
        num_others = sum(s.produces for s in schedule.requests) - len(requests)
        pinned = np.array([request.reproducible for request in requests])
        keys = torch.tensor([request.key for request in requests])
        explored = self.exploration.untrimmed(keys, torch.tensor([request.draws.num_drawn for request in requests]))
        cap = schedule.max_drafts
        if self.config.max_verified_tokens is not None:
            cap = min(cap, self.config.max_verified_tokens)
        inputs = PlanInput(
            survival=np.pad(survival, ((0, num_others), (0, 0))),
            num_drafted=np.pad(num_drafted, (0, num_others)),
            base_tokens=schedule.num_tokens,
            cost=self.cost,
            history=self.history,
            max_verified_tokens=cap,
            forced=np.pad(pinned | explored.numpy(), (0, num_others)),
        )
        plan = self.planner.plan(inputs)
        self.history = update_history(self.history, inputs, plan)
        admitted = plan.num_verified[: len(requests)]
        return [int(count) for count in np.where(pinned, num_drafted, admitted)]

    def _signals(self, requests: list[Request], drafts: list[RequestDraft], num_drafted: Tensor) -> DraftSignals:
        features = torch.stack([draft.round.features[draft.row] for draft in drafts])
        heads = [draft.round.head_logits[draft.row] for draft in drafts if draft.round.head_logits is not None]
        wanted = self.source.feature_names
        q_max = torch.ones(features.shape[:2])
        if self.feature_names:
            q_max = torch.sigmoid(features[:, :, self.feature_names.index("logit_q_max")])
        drawn = torch.stack([draft.round.drawn_probs[draft.row] for draft in drafts])
        prior = float(self.history.continuation[0])
        own = [name for name in self.feature_names if name in wanted]
        assembled = assemble_features(
            wanted,
            features[:, :, : len(own)],
            drawn.log(),
            torch.tensor([request.recent.logit(prior) for request in requests]),
            torch.tensor([request.params.is_greedy for request in requests]),
        )
        return DraftSignals(assembled, num_drafted, q_max, torch.stack(heads) if len(heads) == len(drafts) else None)

    # observe

    def observe(self, accepted: Sequence[int | None], step_ms: float) -> None:
        """Tell the source what verification decided; None: the request failed."""
        record, self._record = self._record, None
        if record is None:
            return
        counts = [accepted[row] for row in record.rows]
        teaches = [
            count is not None and not request.params.alters_target
            for count, request in zip(counts, record.requests, strict=True)
        ]
        for request, count, verified in zip(record.requests, counts, record.num_verified, strict=True):
            request.recent.observe(verified, count or 0)
        outcome = VerificationOutcome(
            torch.tensor(record.num_verified),
            torch.tensor([count or 0 for count in counts]),
            torch.tensor(teaches),
            torch.tensor([request.key for request in record.requests]),
        )
        self.source.observe(record.signals, outcome)

    # draft

    def draft(self, requests: Sequence[Request], counters: Counters) -> None:
        """Hand the drafter what was committed and take its next drafts; one that fails costs a step's drafts."""
        if self._pause > 0:
            self._pause -= 1
            counters.fallbacks["paused"] += 1
            self._drop_pending(requests)
            return
        for request in requests:
            if request.num_computed > self.drafter.max_position:
                request.can_draft, request.features = False, []
        followed = [r for r in requests if r.can_draft and r.num_computed > r.num_drafter_seen]
        if not followed:
            return
        depth = self.num_positions
        limits = [self._limit(request, depth) for request in followed]
        drafting = [row for row, limit in enumerate(limits) if limit > 0]
        sampler = Sampler(
            [followed[row] for row in drafting],
            [limits[row] for row in drafting],
            depth,
            self.num_positions,
            self.num_ids,
            self.feature_names,
            self.drafter.vocab_map,
            self.config.draft_sample_method == "greedy",
        )
        try:
            self.drafter.propose(self._batch(followed, limits), sampler)
            drafts = sampler.drafts_to_host()
        except Exception as error:  # whatever a drafter raises, serving goes on
            self._failed(error, counters)
            self._drop_pending(requests)
            return
        self._failures = 0
        for row, draft in zip(drafting, drafts, strict=True):
            followed[row].draft = draft
        for request in followed:
            request.num_drafter_seen = request.num_computed
            request.features = []

    def _limit(self, request: Request, depth: int) -> int:
        """Most drafts that a request can use now; 0 if it has a draft, nothing to draft after, or no room."""
        known = len(request.tokens)
        if request.draft is not None or request.num_computed < known - 1 or request.num_output == 0:
            return 0
        if known + depth > min(self.max_model_len, self.drafter.max_position):
            return 0
        return min(depth, request.room - 1)

    def _batch(self, requests: list[Request], limits: list[int]) -> DraftBatch:
        features = None
        if self.drafter.taps:
            features = torch.cat([chunk for request in requests for chunk in request.features])
            if not bool(torch.isfinite(features).all()):
                for request in requests:
                    request.can_draft = all(bool(torch.isfinite(chunk).all()) for chunk in request.features)
                raise DraftError("the target's features are not finite")
        token_ids: list[int] = []
        next_ids: list[int] = []
        for request in requests:
            token_ids += request.tokens[request.num_drafter_seen : request.num_computed]
            next_ids += request.tokens[request.num_drafter_seen + 1 : request.num_computed + 1]
        return DraftBatch(
            request_ids=[f"{request.request_id}/{request.index}" for request in requests],
            num_new=[request.num_computed - request.num_drafter_seen for request in requests],
            start_positions=[request.num_drafter_seen for request in requests],
            token_ids=torch.tensor(token_ids),
            next_token_ids=torch.tensor(next_ids),
            features=features,
            block_tables=[request.block_table for request in requests],
            max_drafts=limits,
            histories=[request.tokens for request in requests],
        )

    def _failed(self, error: Exception, counters: Counters) -> None:
        self._failures += 1
        reason = "bad_draft" if isinstance(error, DraftError) else type(error).__name__
        counters.fallbacks[reason] += 1
        if self._failures > 2:
            self._pause = min(2**self._failures, MAX_PAUSE)
        log.warning("drafter failed, no drafts for %d steps: %s", self._pause + 1, error, exc_info=self._failures == 1)

    def _drop_pending(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if request.num_computed - request.num_drafter_seen > MAX_PENDING:
                request.can_draft, request.features = False, []

    # state

    def stats(self) -> PolicyStats:
        """What the policy knows of itself."""
        estimator = getattr(self.source, "estimator", None)
        common = {
            "confidence": self.source.name,
            "planner": self.planner.name,
            "cost_points": tuple((int(t), float(ms)) for t, ms in zip(self.cost.tokens, self.cost.ms, strict=True)),
            "mean_survival": tuple(np.cumprod(self.history.continuation).tolist()),
        }
        if estimator is None:
            return PolicyStats(**common)
        last = estimator.last_round
        return PolicyStats(
            **common,
            slopes=dict(zip(estimator.feature_names, estimator.coefficients.slopes.tolist(), strict=True)),
            intercepts=tuple(estimator.coefficients.intercepts.tolist()),
            num_refits=estimator.num_refits,
            num_refused_refits=estimator.num_refused,
            log_loss=last.log_loss if last is not None else None,
            ece=last.calibration_error if last is not None else None,
        )

    def save(self) -> None:
        """Keep what was learned in the state directory."""


__all__ = ["ScheduledRequest", "Speculation", "StepRecord"]
