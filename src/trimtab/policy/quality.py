"""How good confidences are: AUC, log-loss, calibration error and reliability curve, exact and streaming."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
Binning = Literal["uniform", "quantile"]
_MAX_PENDING = 2048


def _checked(probs: ArrayLike, labels: ArrayLike) -> tuple[Array, Array]:
    probs, labels = np.asarray(probs, dtype=np.float64).ravel(), np.asarray(labels, dtype=np.float64).ravel()
    if probs.shape != labels.shape:
        raise ValueError(f"{probs.shape[0]} probabilities but {labels.shape[0]} labels")
    if probs.shape[0] == 0:
        raise ValueError("nothing to score: no labels")
    if not np.isin(labels, (0.0, 1.0)).all():
        raise ValueError("labels must be 0 or 1")
    return probs, labels


def _checked_probs(probs: ArrayLike, labels: ArrayLike) -> tuple[Array, Array]:
    checked, targets = _checked(probs, labels)
    if not ((checked >= 0) & (checked <= 1)).all():
        raise ValueError("probabilities must lie in [0, 1]")
    return checked, targets


def auc(scores: ArrayLike, labels: ArrayLike) -> float:
    """Area under the ROC curve: the chance that an accepted slot scores above a rejected one, ties counting half.

    Raises:
        ValueError: NaN scores, or labels of one kind only.
    """
    values, targets = _checked(scores, labels)
    if np.isnan(values).any():
        raise ValueError("scores must not be NaN")
    _, groups = np.unique(values, return_inverse=True)
    positives = np.bincount(groups, weights=targets).astype(np.float64)
    return _auc_from_counts(positives, np.bincount(groups).astype(np.float64) - positives)


def _auc_from_counts(positives: Array, negatives: Array) -> float:
    """From counts at each distinct score, ascending."""
    pairs = positives.sum() * negatives.sum()
    if pairs == 0:
        raise ValueError("AUC needs both accepted and rejected slots")
    below = np.cumsum(negatives) - negatives
    return float((positives * (below + negatives / 2)).sum() / pairs)


def log_loss(probs: ArrayLike, labels: ArrayLike) -> float:
    """Mean negative log-likelihood in nats, a probability of 0 counting as one float64 step."""
    values, targets = _checked_probs(probs, labels)
    return float(_losses(values, targets).mean())


def _losses(probs: Array, labels: Array) -> Array:
    losses: Array = -np.log(np.maximum(1 - np.abs(labels - probs), np.finfo(np.float64).eps))
    return losses


@dataclass(frozen=True, slots=True)
class ReliabilityCurve:
    """Per non-empty bin: mean prediction, observed share, number of slots."""

    mean_predicted: Array
    observed: Array
    counts: Array

    @property
    def calibration_error(self) -> float:
        """Expected calibration error: mean over slots of |observed - predicted| of their bin."""
        return float((np.abs(self.observed - self.mean_predicted) * self.counts).sum() / self.counts.sum())


def reliability_curve(
    probs: ArrayLike, labels: ArrayLike, num_bins: int = 10, strategy: Binning = "uniform"
) -> ReliabilityCurve:
    """Predictions against outcomes in bins of equal width, or of equal mass (``quantile``)."""
    values, targets = _checked_probs(probs, labels)
    if num_bins < 1:
        raise ValueError(f"num_bins must be at least 1, got {num_bins}")
    grid = np.linspace(0, 1, num_bins + 1)
    edges = grid if strategy == "uniform" else np.percentile(values, grid * 100)
    bins = np.searchsorted(edges[1:-1], values).astype(np.int64)
    return _curve(*_bin_sums(bins, num_bins, values, targets, np.ones_like(values)))


def _bin_sums(bins: NDArray[np.int64], num_bins: int, *rows: Array) -> list[Array]:
    return [np.bincount(bins, weights=row, minlength=num_bins).astype(np.float64) for row in rows]


def _curve(predicted: Array, positives: Array, counts: Array) -> ReliabilityCurve:
    full = counts > 0
    return ReliabilityCurve(predicted[full] / counts[full], positives[full] / counts[full], counts[full])


def calibration_error(probs: ArrayLike, labels: ArrayLike, num_bins: int = 10, strategy: Binning = "uniform") -> float:
    """Expected calibration error (ECE) over bins of equal width or equal mass."""
    return reliability_curve(probs, labels, num_bins, strategy).calibration_error


@dataclass(frozen=True, slots=True)
class QualitySummary:
    """Scores of a stream; ``auc`` is NaN while labels of one kind are missing."""

    count: int
    log_loss: float
    calibration_error: float
    auc: float
    mean_predicted: float
    mean_observed: float


class StreamingQuality:
    """The same scores in memory that does not grow: log-loss exactly, the others from a histogram of probabilities.

    With ``resolution`` cells of equal width, equal-width ECE is exact for any number of bins that divides it, up to
    values on a bin edge, and the AUC is exact if no two different probabilities share a cell; otherwise it is off by
    at most half the chance that an accepted and a rejected slot fall into the same cell.
    """

    def __init__(self, resolution: int = 1000) -> None:
        if resolution < 1:
            raise ValueError(f"resolution must be at least 1, got {resolution}")
        self.resolution = resolution
        self._sums = np.zeros((3, resolution))  # predicted, accepted, count per cell
        self._loss = 0.0
        # Slots not yet added: adding 2,000 at once costs little more than adding 10.
        self._pending: list[tuple[Array, Array]] = []
        self._num_pending = 0

    @property
    def count(self) -> int:
        """Slots seen."""
        return int(self._sums[2].sum()) + self._num_pending

    def update(self, probs: ArrayLike, labels: ArrayLike) -> None:
        """Add slots; empty arrays add nothing.

        Raises:
            ValueError: lengths that differ, or probabilities outside [0, 1].
        """
        values, targets = np.asarray(probs, dtype=np.float64).ravel(), np.asarray(labels, dtype=np.float64).ravel()
        if values.shape != targets.shape:
            raise ValueError(f"{values.shape[0]} probabilities but {targets.shape[0]} labels")
        if values.shape[0] == 0:
            return
        if not (values.min() >= 0 and values.max() <= 1):
            raise ValueError("probabilities must lie in [0, 1]")
        self._pending.append((values, targets))
        self._num_pending += values.shape[0]
        if self._num_pending >= _MAX_PENDING:
            self._flush()

    def _flush(self) -> None:
        if not self._pending:
            return
        values, targets = (np.concatenate(parts) for parts in zip(*self._pending, strict=True))
        self._pending, self._num_pending = [], 0
        # Cells are open below and closed above, as the bins of reliability_curve.
        cells = np.maximum(np.ceil(values * self.resolution).astype(np.int64) - 1, 0)
        counts = np.bincount(cells + self.resolution * (targets > 0), minlength=2 * self.resolution)
        self._sums[0] += np.bincount(cells, weights=values, minlength=self.resolution)
        self._sums[1] += counts[self.resolution :]
        self._sums[2] += counts[: self.resolution] + counts[self.resolution :]
        self._loss += float(_losses(values, targets).sum())

    def merge(self, other: StreamingQuality) -> None:
        """Add the slots of another stream of the same resolution."""
        if other.resolution != self.resolution:
            raise ValueError(f"can not merge resolution {other.resolution} into {self.resolution}")
        self._flush()
        other._flush()
        self._sums += other._sums
        self._loss += other._loss

    def bin_sums(self, num_bins: int = 10) -> Array:
        """``[3, num_bins]`` sums of predictions, of accepted slots and of slots in bins of equal width."""
        if self.resolution % num_bins:
            raise ValueError(f"num_bins {num_bins} does not divide resolution {self.resolution}")
        self._flush()
        sums: Array = self._sums.reshape(3, num_bins, -1).sum(-1)
        return sums

    def curve(self, num_bins: int = 10, strategy: Binning = "uniform") -> ReliabilityCurve:
        """Reliability curve; ``num_bins`` must divide the resolution for equal width."""
        if strategy == "uniform":
            return _curve(*self.bin_sums(num_bins))
        self._flush()
        before = np.cumsum(self._sums[2]) - self._sums[2]
        bins = np.minimum((before * num_bins / max(self.count, 1)).astype(np.int64), num_bins - 1)
        return _curve(*_bin_sums(bins, num_bins, *self._sums))

    def summary(self) -> QualitySummary:
        """All scores.

        Raises:
            ValueError: no slot was seen.
        """
        if self.count == 0:
            raise ValueError("nothing to score: no labels")
        self._flush()
        predicted, accepted, counts = self._sums
        rejected = counts - accepted
        mixed = accepted.sum() > 0 and rejected.sum() > 0
        return QualitySummary(
            count=self.count,
            log_loss=self._loss / self.count,
            calibration_error=self.curve(10 if self.resolution % 10 == 0 else 1).calibration_error,
            auc=_auc_from_counts(accepted, rejected) if mixed else float("nan"),
            mean_predicted=float(predicted.sum() / counts.sum()),
            mean_observed=float(accepted.sum() / counts.sum()),
        )
