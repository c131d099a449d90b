"""Confidence sources: what turns the signals of a draft into a probability per slot, all behind one protocol.

A source that only reads what :class:`DraftSignals` holds can not anticipate a slot's own drawn token: the signals have
no field for it. Sources are made by name with :func:`make_confidence`; others register their own under the entry point
group ``trimtab.confidences``.
"""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trimtab.policy.estimator import AcceptanceEstimator, VerificationOutcome

ENTRY_POINT_GROUP = "trimtab.confidences"


@dataclass(frozen=True, slots=True)
class DraftSignals:
    """What is known of the drafts of R requests when the step is planned, K positions each."""

    features: Tensor  # [R, K, p] float32, in the order of the source's feature_names
    num_drafted: Tensor  # [R] int; slots past it may hold anything
    q_max: Tensor  # [R, K] probability of the drafter's most likely token
    head_logits: Tensor | None = None  # [R, K] logits of a trained confidence head

    def __post_init__(self) -> None:
        """Refuse shapes that do not fit."""
        shape = self.q_max.shape
        if len(shape) != 2 or self.features.shape[:-1] != shape or self.num_drafted.shape != shape[:1]:
            raise ValueError(
                f"need q_max [R, K], features [R, K, p] and num_drafted [R], got {list(shape)}, "
                f"{list(self.features.shape)} and {list(self.num_drafted.shape)}"
            )
        if self.head_logits is not None and self.head_logits.shape != shape:
            raise ValueError(f"head_logits must be {list(shape)}, got {list(self.head_logits.shape)}")


@runtime_checkable
class ConfidenceSource(Protocol):
    """Gives each slot the chance that the target accepts it, given that it accepted all before it."""

    name: str
    feature_names: tuple[str, ...]  # features it wants in DraftSignals.features, all lossless

    def confidence(self, signals: DraftSignals) -> Tensor:
        """``[R, K]`` float32 in [0, 1]; slots past num_drafted may hold anything."""
        ...

    def observe(self, signals: DraftSignals, outcome: VerificationOutcome) -> None:
        """Learn from what verification decided about the drafts of ``signals``."""
        ...


def survival_probs(confidences: Tensor, num_drafted: Tensor) -> Tensor:
    """Chance that each slot and all before it are accepted.

    Non-increasing along a request also in floats, which prefix-closed ranking relies on. Confidences are clamped to
    [0, 1], a NaN counts as 0, and slots past ``num_drafted`` get 0.

    Args:
        confidences: ``[R, K]``.
        num_drafted: ``[R]`` int.

    Returns:
        ``[R, K]`` float32.
    """
    if confidences.dim() != 2 or num_drafted.shape != confidences.shape[:1]:
        raise ValueError(
            f"need confidences [R, K] and num_drafted [R], got {list(confidences.shape)} and {list(num_drafted.shape)}"
        )
    if confidences.shape[1] == 0:
        return confidences.float()
    positions = torch.arange(confidences.shape[1], device=confidences.device)
    drafted = positions < num_drafted[:, None]
    survival = torch.where(drafted, confidences.float().nan_to_num(0.0).clamp(0.0, 1.0), 0.0).cumprod(-1)
    # The parallel scan of a GPU may round a longer product above a shorter one; the running minimum undoes that.
    return survival.cummin(-1).values if survival.is_cuda else survival


class _Stateless:
    feature_names: tuple[str, ...] = ()

    def observe(self, signals: DraftSignals, outcome: VerificationOutcome) -> None:
        """Nothing to learn."""


class FixedConfidence(_Stateless):
    """Certainty everywhere: verify all that was drafted (no adaptive verification)."""

    name = "fixed"

    def confidence(self, signals: DraftSignals) -> Tensor:
        """``[R, K]`` ones."""
        return torch.ones_like(signals.q_max, dtype=torch.float32)


class RawConfidence(_Stateless):
    """The drafter's top probability itself, not fitted (as EAGLE-2 ranks its tree)."""

    name = "raw"

    def confidence(self, signals: DraftSignals) -> Tensor:
        """``[R, K]`` the top probability."""
        return signals.q_max.float()


class ThresholdConfidence(_Stateless):
    """Verify until the top probability falls under a threshold: 1 before, 0 from there on (as Draft & Verify)."""

    name = "threshold"

    def __init__(self, threshold: float = 0.4) -> None:
        if not 0 <= threshold <= 1:
            raise ValueError(f"threshold must be in [0, 1], got {threshold}")
        self.threshold = threshold

    def confidence(self, signals: DraftSignals) -> Tensor:
        """``[R, K]`` 1 where the top probability reaches the threshold, else 0."""
        return (signals.q_max >= self.threshold).float()


class EstimatorConfidence:
    """The online acceptance estimator; the default where no head exists."""

    name = "estimator"

    def __init__(self, estimator: AcceptanceEstimator) -> None:
        self.estimator = estimator
        self.feature_names = estimator.feature_names

    def confidence(self, signals: DraftSignals) -> Tensor:
        """``[R, K]`` predictions at the current coefficients."""
        return self.estimator.predict(signals.features)

    def observe(self, signals: DraftSignals, outcome: VerificationOutcome) -> None:
        """Add the labels of the step; refits on its own schedule."""
        self.estimator.observe(signals.features, outcome)


class TrainedConfidence(_Stateless):
    """An acceptance classifier fitted offline and then left alone (the idea of SpecDec++, here logistic)."""

    name = "trained"

    def __init__(self, estimator: AcceptanceEstimator) -> None:
        self.estimator = estimator
        self.feature_names = estimator.feature_names

    @classmethod
    def fit(
        cls, features: Tensor, outcome: VerificationOutcome, feature_names: Sequence[str] = ("logit_q_max",)
    ) -> TrainedConfidence:
        """Maximum likelihood on N recorded drafts: ``features [N, K, p]`` and their outcome."""
        estimator = AcceptanceEstimator(features.shape[1], feature_names, refit_interval=1)
        for _ in range(500):
            before = estimator.coefficients
            estimator.observe(features, outcome)
            after = estimator.coefficients
            moved = np.abs(np.concatenate((after.slopes - before.slopes, after.intercepts - before.intercepts))).max()
            if moved < 1e-8:
                break
        return cls(estimator)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], num_positions: int, feature_names: Sequence[str] = ("logit_q_max",)
    ) -> TrainedConfidence:
        """Read a classifier that :meth:`save`, or an online estimator, has written."""
        estimator = AcceptanceEstimator(num_positions, feature_names)
        estimator.load(path)
        return cls(estimator)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON, atomically."""
        self.estimator.save(path)

    def confidence(self, signals: DraftSignals) -> Tensor:
        """``[R, K]`` predictions."""
        return self.estimator.predict(signals.features)


TEMPERATURE_GRID: NDArray[np.float64] = np.geomspace(0.25, 4.0, 33)
_NUM_BINS = 10


def fit_temperature(
    head_logits: NDArray[np.float64],
    accepted: NDArray[np.bool_],
    known: NDArray[np.bool_],
    survival_before: NDArray[np.float64],
) -> float:
    """Temperature of one position that minimises the calibration error of the product up to it.

    Args:
        head_logits: ``[N]`` logits of the head at this position.
        accepted: ``[N]`` whether the draft was accepted through this position.
        known: ``[N]`` whether that is known.
        survival_before: ``[N]`` calibrated product of the positions before.

    Returns:
        The best of 33 temperatures between 1/4 and 4, the one nearest 1 among equals; 1 without labels.
    """
    if not known.any():
        return 1.0
    # All temperatures at once: per bin, the gap of an equal-width calibration error is |sum(predicted - accepted)|.
    scaled = torch.from_numpy(head_logits[known, None] / TEMPERATURE_GRID)
    predicted = survival_before[known, None] * torch.sigmoid(scaled).numpy()
    cells = np.minimum((predicted * _NUM_BINS).astype(np.int64), _NUM_BINS - 1)
    cells += _NUM_BINS * np.arange(len(TEMPERATURE_GRID))
    gaps = np.bincount(
        cells.ravel(),
        weights=(predicted - accepted[known, None]).ravel(),
        minlength=_NUM_BINS * len(TEMPERATURE_GRID),
    )
    errors = np.abs(gaps.reshape(-1, _NUM_BINS)).sum(1) / known.sum()
    order = np.lexsort((np.abs(np.log(TEMPERATURE_GRID)), np.round(errors, 12)))
    return float(TEMPERATURE_GRID[order[0]])


class HeadConfidence:
    """A trained confidence head behind one temperature per position.

    Temperatures are fitted left to right (sequential temperature scaling): each makes the *product* of confidences up
    to its position as calibrated as it can be, the ones before it fixed. The last 2,048 drafts are kept for that, and
    one position is refitted at a time so that no step pays for all.
    """

    name = "head"
    feature_names: tuple[str, ...] = ()

    def __init__(
        self,
        num_positions: int,
        temperatures: Sequence[float] | None = None,
        *,
        refit_interval: int = 400,
        capacity: int = 2048,
        min_labels: int = 200,
    ) -> None:
        values = np.ones(num_positions) if temperatures is None else np.array(temperatures, dtype=np.float64)
        if values.shape != (num_positions,) or not (np.isfinite(values) & (values > 0)).all():
            raise ValueError(f"need {num_positions} positive temperatures, got {temperatures}")
        if num_positions < 1 or refit_interval < 1 or capacity < 1:
            raise ValueError("num_positions, refit_interval and capacity must be at least 1")
        self.temperatures = values
        self.refit_interval = refit_interval
        self.min_labels = min_labels
        self._logits = np.zeros((capacity, num_positions))
        self._counts = np.full((capacity, 2), 0, dtype=np.int64)  # verified, accepted
        self._num_rows = 0
        self._num_steps = 0
        self._next_position = 0

    def confidence(self, signals: DraftSignals) -> Tensor:
        """``[R, K]`` sigmoid of the head's logits over the temperatures.

        Raises:
            ValueError: the drafter gave no head logits.
        """
        logits = self._head_logits(signals)
        scale = torch.from_numpy(1 / self.temperatures).to(logits.device, torch.float32)
        return torch.sigmoid(logits.float() * scale)

    def observe(self, signals: DraftSignals, outcome: VerificationOutcome) -> None:
        """Keep the step's drafts; now and then refit the next position from those kept."""
        logits = self._head_logits(signals).detach().cpu().double().numpy()
        counts = torch.stack((outcome.num_verified, outcome.num_accepted), dim=1).cpu().numpy()
        keep = outcome.teaches.cpu().numpy() & (counts[:, 0] > 0) & np.isfinite(logits).all(1)
        logits, counts = logits[keep], counts[keep]
        rows = (self._num_rows + np.arange(len(logits))) % len(self._logits)
        self._logits[rows], self._counts[rows] = logits, counts
        self._num_rows += len(logits)
        self._num_steps += 1
        if self._num_steps % max(1, self.refit_interval // len(self.temperatures)) == 0:
            self._refit_position(self._next_position)
            self._next_position = (self._next_position + 1) % len(self.temperatures)

    def fit(self) -> None:
        """Refit every position now, left to right."""
        for position in range(len(self.temperatures)):
            self._refit_position(position)

    def _refit_position(self, position: int) -> None:
        size = min(self._num_rows, len(self._logits))
        logits, verified, accepted = self._logits[:size], self._counts[:size, 0], self._counts[:size, 1]
        # Rejections of drafts trimmed before this position are left out too: their acceptances could not be seen.
        known = verified > position
        if known.sum() < self.min_labels:
            return
        before = (1 / (1 + np.exp(-logits[:, :position] / self.temperatures[:position]))).prod(1)
        self.temperatures[position] = fit_temperature(logits[:, position], accepted > position, known, before)

    def _head_logits(self, signals: DraftSignals) -> Tensor:
        if signals.head_logits is None:
            raise ValueError('this drafter has no confidence head; use confidence "estimator"')
        if signals.head_logits.shape[1] != len(self.temperatures):
            raise ValueError(f"head_logits have K = {signals.head_logits.shape[1]}, not {len(self.temperatures)}")
        return signals.head_logits


def _make_estimator(num_positions: int, **options: Any) -> EstimatorConfidence:
    return EstimatorConfidence(AcceptanceEstimator(num_positions, **options))


def _make_trained(num_positions: int, path: str | os.PathLike[str], **options: Any) -> TrainedConfidence:
    return TrainedConfidence.load(path, num_positions, **options)


BUILTIN_CONFIDENCES: dict[str, Callable[..., ConfidenceSource]] = {
    "estimator": _make_estimator,
    "head": HeadConfidence,
    "raw": lambda num_positions: RawConfidence(),
    "threshold": lambda num_positions, **options: ThresholdConfidence(**options),
    "trained": _make_trained,
    "fixed": lambda num_positions: FixedConfidence(),
}


def confidence_names() -> list[str]:
    """Every name that :func:`make_confidence` knows, registered ones included."""
    return [*BUILTIN_CONFIDENCES, *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))]


def make_confidence(name: str, num_positions: int, **options: Any) -> ConfidenceSource:
    """Make a confidence source by name.

    Args:
        name: a key of BUILTIN_CONFIDENCES, or an entry point of ``trimtab.confidences``: a callable that takes
            ``num_positions`` and the options and returns a ConfidenceSource.
        num_positions: K.
        options: handed to the source; ``feature_names`` for estimator and trained, ``path`` for trained,
            ``threshold`` for threshold, ``temperatures`` for head.

    Raises:
        ValueError: no such source, with the nearest known name.
        TypeError: an option that the source does not take, or what an entry point made is no ConfidenceSource.
    """
    factory = BUILTIN_CONFIDENCES.get(name)
    if factory is None:
        points = [point for point in entry_points(group=ENTRY_POINT_GROUP) if point.name == name]
        if not points:
            close = difflib.get_close_matches(name, confidence_names(), n=1)
            hint = f'did you mean "{close[0]}"?' if close else f"known: {', '.join(confidence_names())}"
            raise ValueError(f'unknown confidence source "{name}"; {hint}')
        factory = points[0].load()
    source = factory(num_positions, **options)
    if inspect.isclass(source) or not isinstance(source, ConfidenceSource):
        raise TypeError(f'"{name}" made {source!r}, which lacks name, feature_names, confidence() or observe()')
    return source
