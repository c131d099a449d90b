"""The engine's side of speculation: what the policy is asked, what it is told, and what the drafter is given."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trimtab.drafters import DraftBatch, Drafter, make_drafter
from trimtab.engine.config import EngineConfig, SpeculativeConfig
from trimtab.engine.drafting import DraftError, RequestDraft, Sampler, distribution_features
from trimtab.engine.profiling import cost_model
from trimtab.engine.request import Request
from trimtab.engine.scheduler import Schedule, ScheduledRequest
from trimtab.engine.stats import Counters, PolicyStats
from trimtab.models.executor import ModelExecutor
from trimtab.policy import (
    ConfidenceSource,
    CostModel,
    DepthInput,
    DraftGate,
    DraftSignals,
    EstimatorConfidence,
    EstimatorFileError,
    Exploration,
    HistoryDepth,
    PlanInput,
    Planner,
    PlannerHistory,
    StepShape,
    VerificationOutcome,
    assemble_features,
    make_confidence,
    make_planner,
    survival_probs,
    update_history,
)

log = logging.getLogger(__name__)

WARM_UP_ROUNDS = 3  # short rounds of an estimator that knows nothing, in which everything is drafted and verified
WARM_UP_STEPS = 10  # of one such round
MAX_BEHIND = 128  # committed positions that a drafter may lag while nothing is drafted
MAX_PENDING = 1024  # committed positions that a request may keep for a drafter that does not come
MAX_PAUSE = 256  # steps without drafts after repeated failures


@dataclass(frozen=True, slots=True)
class DraftRecord:
    """What one step planned for the scheduled requests that had a draft."""

    rows: list[int]  # their indices in the schedule
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
        cost: CostModel,
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
        self.adaptive = planner.name != "fixed"
        self.gate = DraftGate()
        self.depth_rule = HistoryDepth()
        self._record: DraftRecord | None = None
        self._shape: StepShape | None = None
        self.num_untrimmed = 0
        self._num_warm_up_steps = 0
        self._failures = 0
        self._pause = 0
        self._cost_path: Path | None = None
        self._state_path: Path | None = None

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
        source = _make_source(speculative, drafter) if adaptive else make_confidence("fixed", drafter.num_positions)
        names = [speculative.planner] if speculative.planner is not None else []
        planner = make_planner(*names) if adaptive else make_planner("fixed")
        if planner.name == "fixed":
            cost, path = CostModel.constant(), None
        else:
            cost, path = cost_model(
                executor, drafter, config.max_num_seqs, config.max_num_batched_tokens, config.state_dir
            )
        self = cls(drafter, speculative, source, planner, cost, num_ids, max_model_len, config.seed)
        self._cost_path = path
        if config.state_dir is not None:
            self._state_path = Path(config.state_dir) / _state_name(executor, drafter)
            self._load_state()
        return self

    @property
    def warming_up(self) -> bool:
        """Whether the estimator has yet to see what this pair of models does; its start values may be far off."""
        return isinstance(self.source, EstimatorConfidence) and self.source.estimator.num_refits < WARM_UP_ROUNDS

    # plan

    def plan(self, schedule: Schedule) -> None:
        """Decide how many drafts of each scheduled request are verified."""
        self._record = None
        rows = [i for i, s in enumerate(schedule.requests) if s.produces and s.request.draft is not None]
        producing = [s.request for s in schedule.requests if s.produces]
        context = sum(s.request.num_computed for s in schedule.requests)
        shape = StepShape(len(producing), len(producing), schedule.num_tokens - len(producing), context)
        if rows:
            requests = [schedule.requests[i].request for i in rows]
            drafts = [request.draft for request in requests if request.draft is not None]
            num_drafted = torch.tensor([len(draft.tokens) for draft in drafts])
            signals = self._signals(requests, drafts, num_drafted)
            survival = survival_probs(self.source.confidence(signals), num_drafted)
            counts = self._admit(requests, survival.numpy(), num_drafted.numpy(), shape, schedule.max_drafts)
            for row, count in zip(rows, counts, strict=True):
                schedule.requests[row].num_drafts = count
            self._record = DraftRecord(rows, requests, counts, signals)
            shape = replace(shape, num_tokens=shape.num_tokens + sum(counts))
        elif producing and self.adaptive:
            self.gate = self.gate.after(0)
        self._shape = shape

    def _admit(
        self,
        requests: list[Request],
        survival: NDArray[Any],
        num_drafted: NDArray[Any],
        shape: StepShape,
        max_drafts: int,
    ) -> list[int]:
        num_others = shape.num_requests - len(requests)
        pinned = np.array([request.reproducible for request in requests])
        keys = torch.tensor([request.key for request in requests])
        counters = torch.tensor([request.draws.num_drawn for request in requests])
        explored = self.exploration.untrimmed(keys, counters).numpy()
        cap = self.config.max_verified_tokens
        inputs = PlanInput(
            survival=np.pad(survival, ((0, num_others), (0, 0))),
            num_drafted=np.pad(num_drafted, (0, num_others)),
            base_tokens=shape.all_tokens,
            cost=self.cost.curve(
                shape.num_requests, shape.prefill_tokens, shape.context_tokens, self._draft_ms(len(requests))
            ),
            history=self.history,
            max_verified_tokens=max_drafts if cap is None else min(cap, max_drafts),
            forced=np.pad(pinned | explored | self.warming_up, (0, num_others)),
        )
        plan = self.planner.plan(inputs)
        if not self.warming_up:  # what an estimator predicts that knows nothing must not count as experience
            self.history = update_history(self.history, inputs, plan)
        self.num_untrimmed += int(explored.sum())
        if self.adaptive and not self.warming_up:  # what is verified anyway says nothing about whether drafting pays
            self.gate = self.gate.after(int(plan.num_verified[: len(requests)][~(pinned | explored)].sum()))
        return [int(count) for count in np.where(pinned, num_drafted, plan.num_verified[: len(requests)])]

    def _draft_ms(self, num_requests: int) -> float:
        return self.cost.draft_ms(num_requests, self.num_positions)

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
        if self._shape is not None:
            self.cost.observe(self._shape, step_ms)
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
        warming_up = self.warming_up
        self.source.observe(record.signals, outcome)
        if warming_up and isinstance(self.source, EstimatorConfidence):
            self._num_warm_up_steps += any(teaches)
            if self._num_warm_up_steps >= WARM_UP_STEPS:
                self.source.estimator.refit()
                self._num_warm_up_steps = 0

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
        depth = self._depth(followed)
        full = self.num_positions
        limits = [self._limit(r, full if r.reproducible else depth) for r in followed]
        drafting = [row for row, limit in enumerate(limits) if limit > 0]
        if any(followed[row].reproducible for row in drafting):
            depth = full
        if not drafting and all(r.num_computed - r.num_drafter_seen < MAX_BEHIND for r in followed):
            return
        start = time.perf_counter()
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
        if drafting:
            self.cost.observe_draft(len(drafting), depth, 1e3 * (time.perf_counter() - start))
        for row, draft in zip(drafting, drafts, strict=True):
            followed[row].draft = draft
        for request in followed:
            request.num_drafter_seen = request.num_computed
            request.features = []

    def _depth(self, requests: Sequence[Request]) -> int:
        """Positions to draft, from history alone; 0 while drafting does not pay."""
        if not self.adaptive or self.warming_up:
            return self.num_positions
        if not self.gate.drafts:
            return 0
        if self.gate.probing:
            return self.num_positions
        count = len(requests)
        context = sum(request.num_computed for request in requests)
        draft_ms = self.cost.draft_curve(count, self.num_positions)
        inputs = DepthInput(count, count, self.cost.curve(count, 0, context), draft_ms, self.history)
        depth = self.depth_rule.depth(inputs)
        return depth if self.drafter.autoregressive or depth == 0 else self.num_positions

    def _limit(self, request: Request, depth: int) -> int:
        """Most drafts that a request can use now; 0 if it has a draft, nothing to draft after, or no room."""
        known = len(request.tokens)
        if depth == 0:
            return 0
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
        last_step = self._shape or StepShape(1, 1)
        curve = self.cost.curve(last_step.num_requests, 0, last_step.context_tokens)
        stats = PolicyStats(
            confidence=self.source.name,
            planner=self.planner.name,
            num_untrimmed=self.num_untrimmed,
            cost_points=tuple((int(t), float(ms)) for t, ms in zip(curve.tokens, curve.ms, strict=True)),
            cost_measured=tuple(self.cost.measured),
            cost_relative_error=self.cost.relative_error,
            mean_survival=tuple(np.cumprod(self.history.continuation).tolist()),
        )
        if not isinstance(self.source, EstimatorConfidence):
            return stats
        estimator = self.source.estimator
        last = estimator.last_round
        return replace(
            stats,
            slopes=dict(zip(estimator.feature_names, estimator.coefficients.slopes.tolist(), strict=True)),
            intercepts=tuple(estimator.coefficients.intercepts.tolist()),
            num_refits=estimator.num_refits,
            num_refused_refits=estimator.num_refused,
            log_loss=last.log_loss if last is not None else None,
            ece=last.calibration_error if last is not None else None,
            reliability=tuple((p / n, a / n, n) for p, a, n in estimator.recent_bins.T.tolist() if n > 0),
        )

    def save(self) -> None:
        """Keep what was learned: the cost model, and the estimator if there is a state directory."""
        if self._cost_path is not None:
            self.cost.save(self._cost_path)
        if self._state_path is not None and isinstance(self.source, EstimatorConfidence):
            self.source.estimator.save(self._state_path)

    def _load_state(self) -> None:
        if self._state_path is None or not isinstance(self.source, EstimatorConfidence):
            return
        try:
            self.source.estimator.load(self._state_path)
        except FileNotFoundError:
            pass
        except EstimatorFileError as error:
            log.warning("starting with a fresh estimator: %s", error)


def _make_source(config: SpeculativeConfig, drafter: Drafter) -> ConfidenceSource:
    has_head = bool(getattr(drafter, "has_confidence_head", False))
    name = config.confidence or ("head" if has_head else "estimator")
    if name == "head" and not has_head:
        raise ValueError(f'drafter "{drafter.name}" has no confidence head; use confidence "estimator"')
    features = config.confidence_features
    if features is None and name == "estimator":
        # A one-hot draft has no distribution to read; how the request fared so far stands in.
        features = ("logit_q_max", "request_acceptance" if drafter.name == "ngram" else "is_greedy")
    options: dict[str, Any] = {} if features is None else {"feature_names": tuple(features)}
    return make_confidence(name, drafter.num_positions, **options)


def _state_name(executor: ModelExecutor, drafter: Drafter) -> str:
    name = f"{executor.loaded.name}-{drafter.name}-{drafter.num_positions}"
    return f"estimator-{re.sub('[^A-Za-z0-9]+', '-', name).strip('-')}.json"


__all__ = ["DraftRecord", "ScheduledRequest", "Speculation"]
