"""The arithmetic of the acceptance estimator: sums of one round, and the Newton step that they give.

Pure functions on float64 arrays. A logistic model with p shared slopes and K intercepts has an arrowhead Hessian, so
one step is a p x p solve. All statistics are sums over slots: they add over steps, requests and replicas.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

Array = NDArray[np.float64]

RIDGE = 1e-3
DAMPING = 50.0
MIN_CONTRIBUTORS = 8


@dataclass(frozen=True, slots=True)
class Coefficients:
    """``confidence = sigmoid(features · slopes + intercepts[position])``."""

    slopes: Array  # [p]
    intercepts: Array  # [K]

    def is_finite(self) -> bool:
        """Whether every number is finite."""
        return bool(np.isfinite(self.slopes).all() and np.isfinite(self.intercepts).all())


@dataclass(frozen=True, slots=True)
class RoundSums:
    """The six sums of one round; section names as in the usual statement of iteratively reweighted least squares."""

    slope_hessian: Array  # [p, p]  sum of w f f'
    cross_hessian: Array  # [K, p]  sum of w f at each position
    intercept_hessian: Array  # [K]  sum of w
    slope_gradient: Array  # [p]  sum of e f
    intercept_gradient: Array  # [K]  sum of e
    counts: Array  # [K]  observed slots

    @staticmethod
    def width(num_positions: int, num_features: int) -> int:
        """Numbers in the flat form."""
        return num_features * (num_features + 1 + num_positions) + 3 * num_positions

    @classmethod
    def unflatten(cls, flat: Array, num_positions: int, num_features: int) -> RoundSums:
        """Inverse of the row layout of :func:`contributions`."""
        K, p = num_positions, num_features
        parts = np.split(flat, np.cumsum([p * p, K * p, K, p, K]))
        return cls(parts[0].reshape(p, p), parts[1].reshape(K, p), *parts[2:])


def sigmoid(logits: Array) -> Array:
    """Logistic function; torch's takes a third of the time of numpy's exponential."""
    result: Array = torch.sigmoid(torch.from_numpy(logits)).numpy()
    return result


def predict_probs(features: Array, coefficients: Coefficients) -> Array:
    """``[R, K, p]`` features to ``[R, K]`` confidences."""
    if features.shape[-1] == 1:
        return sigmoid(features[..., 0] * coefficients.slopes[0] + coefficients.intercepts)
    return sigmoid(features @ coefficients.slopes + coefficients.intercepts)


def contributions(features: Array, probs: Array, labels: NDArray[np.bool_], observed: NDArray[np.bool_]) -> Array:
    """What each request adds to the sums of a round: ``[R, width]``.

    Args:
        features: ``[R, K, p]``, finite.
        probs: ``[R, K]`` confidences at the current coefficients.
        labels: ``[R, K]`` accepted.
        observed: ``[R, K]`` slots that the target judged; all others add nothing.
    """
    num_requests, num_positions, num_features = features.shape
    mask = observed.astype(np.float64)
    errors = (labels - probs) * mask
    weights = probs * (1 - probs) * mask
    weighted = weights[..., None] * features
    parts = (
        np.einsum("rkp,rkq->rpq", weighted, features).reshape(num_requests, num_features**2),
        weighted.reshape(num_requests, num_positions * num_features),
        weights,
        np.einsum("rk,rkp->rp", errors, features),
        errors,
        mask,
    )
    return np.concatenate(parts, axis=1)


def newton_step(sums: RoundSums) -> Coefficients:
    """Damped Newton step from the sums of a round, by the Schur complement of the intercept block.

    Positions with few observations move less: each part of the step is scaled by n / (n + 50).
    """
    diagonal = sums.intercept_hessian + RIDGE
    ratio = sums.cross_hessian / diagonal[:, None]
    num_features = sums.slope_gradient.shape[0]
    schur = sums.slope_hessian + RIDGE * np.eye(num_features) - sums.cross_hessian.T @ ratio
    slopes = np.linalg.solve(schur, sums.slope_gradient - ratio.T @ sums.intercept_gradient)
    intercepts = (sums.intercept_gradient - sums.cross_hessian @ slopes) / diagonal
    total = sums.counts.sum()
    return Coefficients(slopes * (total / (total + DAMPING)), intercepts * (sums.counts / (sums.counts + DAMPING)))


def intercept_step(sums: RoundSums) -> Coefficients:
    """The same step with the slopes held."""
    intercepts = sums.intercept_gradient / (sums.intercept_hessian + RIDGE)
    return Coefficients(np.zeros_like(sums.slope_gradient), intercepts * (sums.counts / (sums.counts + DAMPING)))


def contributor_weights(buckets: Array, num_positions: int, num_features: int, limit: float) -> Array:
    """``[B]`` weights in (0, 1] that keep any one bucket from pulling harder than ``limit`` times the median bucket.

    The pull of a bucket is the length of its gradient u in the metric of the round, sqrt(u' H⁻¹ u): the distance, in
    standard errors of the round's own fit, that it would move the coefficients. However extreme the labels and
    features of one contributor, its weighted pull is at most ``limit`` times the median, and the median is set by the
    majority. Fewer than 8 buckets in use have no majority to speak of and keep weight 1.
    """
    weights = np.ones(buckets.shape[0])
    sums = RoundSums.unflatten(buckets.sum(0), num_positions, num_features)
    used = buckets[:, -num_positions:].sum(1) > 0
    if used.sum() < MIN_CONTRIBUTORS:
        return weights
    top = np.concatenate((sums.slope_hessian, sums.cross_hessian.T), axis=1)
    bottom = np.concatenate((sums.cross_hessian, np.diag(sums.intercept_hessian)), axis=1)
    hessian = np.concatenate((top, bottom)) + RIDGE * np.eye(num_features + num_positions)
    end = buckets.shape[1] - num_positions
    gradients = buckets[used, end - num_features - num_positions : end]
    pulls = np.sqrt(np.maximum((gradients @ np.linalg.inv(hessian) * gradients).sum(1), 0))
    weights[used] = np.minimum(1.0, limit * np.median(pulls) / np.maximum(pulls, 1e-12))
    return weights


def largest_move(probes: Array, before: Coefficients, step: Coefficients, scale: float) -> float:
    """Largest change of a confidence under ``scale`` times ``step``, over ``[M, p]`` probes and all positions."""
    old = (probes @ before.slopes)[:, None] + before.intercepts
    move = scale * ((probes @ step.slopes)[:, None] + step.intercepts)
    return float(np.abs(sigmoid(old + move) - sigmoid(old)).max())


def cap_step(probes: Array, before: Coefficients, step: Coefficients, max_move: float) -> Coefficients:
    """Shorten ``step`` until no confidence at the probes moves by more than ``max_move``."""
    if probes.shape[0] == 0 or largest_move(probes, before, step, 1.0) <= max_move:
        return step
    low, high = 0.0, 1.0
    for _ in range(50):  # a step off a saturated start can be 1e8 too long
        middle = (low + high) / 2
        if largest_move(probes, before, step, middle) <= max_move:
            low = middle
        else:
            high = middle
    return Coefficients(step.slopes * low, step.intercepts * low)
