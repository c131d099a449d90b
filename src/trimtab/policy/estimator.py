"""The online acceptance estimator: a logistic regression fitted while serving, from what verification decides anyway.

>>> import torch
>>> estimator = AcceptanceEstimator(num_positions=2)
>>> features = torch.zeros(1, 2, 1)
>>> [round(float(c), 3) for c in estimator.predict(features)[0]]
[0.45, 0.45]
>>> outcome = VerificationOutcome(
...     num_verified=torch.tensor([2]), num_accepted=torch.tensor([1]), teaches=torch.tensor([True])
... )
>>> for _ in range(100):
...     estimator.observe(features, outcome)
>>> estimator.num_refits
1
>>> first, second = estimator.predict(features)[0].tolist()
>>> first > 0.45 > second
True
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trimtab.policy import irls
from trimtab.policy.features import FEATURE_LIMIT, require_lossless
from trimtab.policy.irls import Array, Coefficients, RoundSums
from trimtab.policy.quality import QualitySummary, StreamingQuality

START_SLOPE = 0.5
START_INTERCEPT = -0.2
FILE_FORMAT = "trimtab-acceptance-estimator"
FILE_VERSION = 1
NUM_BUCKETS = 64
_NUM_PROBES = 512
_PROBES_PER_STEP = 16


class EstimatorFileError(ValueError):
    """A saved estimator does not fit the one that is being loaded."""


@dataclass(frozen=True, slots=True)
class VerificationOutcome:
    """What verification decided for R requests, and whether each may teach the shared coefficients.

    ``teaches`` has no default on purpose: a request whose target distribution was changed by something the drafter did
    not see (penalties, logit bias, allowed tokens, a grammar) must say False.
    """

    num_verified: Tensor  # [R] int, admitted slots
    num_accepted: Tensor  # [R] int, accepted slots; fewer than verified means that the next one was rejected
    teaches: Tensor  # [R] bool
    contributors: Tensor | None = None  # [R] int64, same number for whoever must be limited together (see request_key)

    def __post_init__(self) -> None:
        """Refuse counts that can not be."""
        shape = self.num_verified.shape
        if len(shape) != 1 or self.num_accepted.shape != shape or self.teaches.shape != shape:
            raise ValueError(
                f"num_verified, num_accepted and teaches must all be [R], got {list(shape)}, "
                f"{list(self.num_accepted.shape)}, {list(self.teaches.shape)}"
            )
        if self.contributors is not None and self.contributors.shape != shape:
            raise ValueError(f"contributors must be {list(shape)}, got {list(self.contributors.shape)}")
        if self.teaches.dtype != torch.bool:
            raise ValueError(f"teaches must be bool, got {self.teaches.dtype}")
        if self.num_verified.is_floating_point() or self.num_accepted.is_floating_point():
            raise ValueError("num_verified and num_accepted must be integers")
        verified, accepted = self.num_verified.cpu().numpy(), self.num_accepted.cpu().numpy()
        if (accepted < 0).any() or (accepted > verified).any():
            raise ValueError(f"need 0 <= num_accepted <= num_verified, got {accepted.tolist()} and {verified.tolist()}")

    def labels_to_host(self, num_positions: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """``[R, K]`` accepted, and ``[R, K]`` observed: accepted or first rejected, of requests that teach."""
        verified, accepted = self.num_verified.cpu().numpy()[:, None], self.num_accepted.cpu().numpy()[:, None]
        positions = np.arange(num_positions)
        observed = positions < np.minimum(verified, accepted + 1)
        return positions < accepted, observed & self.teaches.cpu().numpy()[:, None]


@dataclass(frozen=True, slots=True)
class Accumulators:
    """Sums of a round in progress, with the coefficients at which they were taken. They add up over replicas."""

    coefficients: Coefficients
    buckets: Array  # [64, width] one row per bucket of contributors
    num_steps: int


class AcceptanceEstimator:
    """p shared slopes and K intercepts; predicts ``[R, K]`` confidences and learns from outcomes.

    With the default single feature this is the published estimator. Its memory does not depend on how many steps or
    requests it has seen: 64 buckets of sums and at most 512 feature vectors without labels.

    Args:
        num_positions: K.
        feature_names: what the last dimension of the features holds; lossy ones are refused.
        refit_interval: steps per round.
        max_move: no confidence moves by more than this in one refit. For one feature that holds over its whole range
            (checked every 0.25 log-odds), for several at up to 512 recently seen slots.
        contributor_limit: no contributor pulls a refit harder than this many times the median contributor.
    """

    def __init__(
        self,
        num_positions: int,
        feature_names: Sequence[str] = ("logit_q_max",),
        *,
        refit_interval: int = 100,
        max_move: float = 0.25,
        contributor_limit: float = 3.0,
    ) -> None:
        if num_positions < 1:
            raise ValueError(f"num_positions must be at least 1, got {num_positions}")
        if not feature_names or len(set(feature_names)) != len(feature_names):
            raise ValueError(f"feature_names must be distinct and not empty, got {list(feature_names)}")
        if refit_interval < 1:
            raise ValueError(f"refit_interval must be at least 1, got {refit_interval}")
        if not max_move > 0 or not contributor_limit > 0:
            raise ValueError(f"max_move and contributor_limit must be positive, got {max_move} and {contributor_limit}")
        require_lossless(feature_names)
        self.num_positions = num_positions
        self.feature_names = tuple(feature_names)
        self.refit_interval = refit_interval
        self.max_move = max_move
        self.contributor_limit = contributor_limit
        self.num_refits = self.num_refused = self.num_labels = self.num_dropped_slots = 0
        self.last_round: QualitySummary | None = None
        """Progressive log-loss and calibration of the last whole round: each slot scored before it was learned."""
        self.recent_bins: Array = np.zeros((3, 10))
        """``[3, 10]`` sums of predictions, accepted slots and slots by tenth of the prediction, scored likewise; a
        round counts for 0.9 of the one after it."""
        slopes = np.zeros(len(self.feature_names))
        slopes[self._monotone_index()] = START_SLOPE
        self.coefficients = Coefficients(slopes, np.full(num_positions, START_INTERCEPT))
        self._probes = np.linspace(-FEATURE_LIMIT, FEATURE_LIMIT, 321)[:, None]
        if len(self.feature_names) > 1:
            self._probes = np.empty((0, len(self.feature_names)))
        self._clear_round()

    def _monotone_index(self) -> int:
        return self.feature_names.index("logit_q_max") if "logit_q_max" in self.feature_names else 0

    def _clear_round(self) -> None:
        self._buckets = np.zeros((NUM_BUCKETS, RoundSums.width(self.num_positions, len(self.feature_names))))
        self._num_steps = 0
        self._quality = StreamingQuality()

    def _features_to_host(self, features: Tensor) -> tuple[Array, NDArray[np.bool_]]:
        expected = (self.num_positions, len(self.feature_names))
        if features.dim() != 3 or tuple(features.shape[1:]) != expected:
            raise ValueError(f"features must be [R, {expected[0]}, {expected[1]}], got {list(features.shape)}")
        values = features.detach().cpu().numpy().astype(np.float64)
        finite: NDArray[np.bool_] = np.asarray(np.isfinite(values).all(-1))
        if not finite.all():
            values[~finite] = 0.0
        return values, finite

    def predict(self, features: Tensor) -> Tensor:
        """``[R, K, p]`` features to ``[R, K]`` float32 confidences on the same device.

        A slot with a feature that is not finite gets the confidence of its position at feature 0.
        """
        values, _ = self._features_to_host(features)
        probs = irls.predict_probs(values, self.coefficients).astype(np.float32)
        return torch.from_numpy(probs).to(features.device)

    def observe(self, features: Tensor, outcome: VerificationOutcome) -> None:
        """Learn from one step; every ``refit_interval`` steps the coefficients move.

        Args:
            features: ``[R, K, p]`` as given to :meth:`predict`; slots past the verified ones may hold anything.
            outcome: what the target decided about the same R requests.
        """
        values, finite = self._features_to_host(features)
        if values.shape[0] != outcome.num_verified.shape[0]:
            raise ValueError(f"{values.shape[0]} rows of features but {outcome.num_verified.shape[0]} outcomes")
        labels, observed = outcome.labels_to_host(self.num_positions)
        if not finite.all():
            self.num_dropped_slots += int((observed & ~finite).sum())
            observed = observed & finite
        probs = irls.predict_probs(values, self.coefficients)
        rows = irls.contributions(values, probs, labels, observed)
        if outcome.contributors is None:
            self._buckets[0] += rows.sum(0)
        else:
            membership = np.zeros((NUM_BUCKETS, rows.shape[0]))
            membership[outcome.contributors.cpu().numpy() % NUM_BUCKETS, np.arange(rows.shape[0])] = 1.0
            self._buckets += membership @ rows
        self._quality.update(probs[observed], labels[observed])
        if len(self.feature_names) > 1:
            seen = values[observed]
            seen = seen[:: max(1, -(-len(seen) // _PROBES_PER_STEP))]
            self._probes = np.concatenate((self._probes, seen))[-_NUM_PROBES:]
        self._num_steps += 1
        if self._num_steps >= self.refit_interval:
            self.refit()

    def refit(self) -> None:
        """Take one Newton step from the sums of the round and start the next round."""
        shape = (self.num_positions, len(self.feature_names))
        weights = irls.contributor_weights(self._buckets, *shape, self.contributor_limit)
        sums = RoundSums.unflatten(weights @ self._buckets, *shape)
        self.num_labels += int(self._buckets[:, -self.num_positions :].sum())
        if self._quality.count:
            self.last_round = self._quality.summary()
            self.recent_bins = 0.9 * self.recent_bins + self._quality.bin_sums()
        self._clear_round()
        self.num_refits += 1
        if not self._take(irls.newton_step(sums)):
            self.num_refused += 1
            # A shared slope can not turn negative, but drafts that all look alike (one-hot) must still be learned.
            self._take(irls.intercept_step(sums))

    def _take(self, step: Coefficients) -> bool:
        if not step.is_finite():
            return False
        step = irls.cap_step(self._probes, self.coefficients, step, self.max_move)
        index = self._monotone_index()
        slopes = self.coefficients.slopes + step.slopes
        if self.feature_names[index] == "logit_q_max" and slopes[index] < 0:
            return False
        self.coefficients = Coefficients(slopes, self.coefficients.intercepts + step.intercepts)
        return True

    @property
    def accumulators(self) -> Accumulators:
        """A copy of the sums of the round in progress, to be sent to whoever fits for the fleet."""
        return Accumulators(self.coefficients, self._buckets.copy(), self._num_steps)

    def merge(self, other: AcceptanceEstimator | Accumulators) -> None:
        """Add the sums of a replica. Both must have been taken at the same coefficients.

        Raises:
            ValueError: another K, feature set or coefficients: send the fitted coefficients to every replica first.
        """
        if isinstance(other, AcceptanceEstimator):
            if other.feature_names != self.feature_names:
                raise ValueError(f"can not merge features {other.feature_names} into {self.feature_names}")
            other = other.accumulators
        theirs, ours = other.coefficients, self.coefficients
        if other.buckets.shape != self._buckets.shape or not (
            np.array_equal(theirs.slopes, ours.slopes) and np.array_equal(theirs.intercepts, ours.intercepts)
        ):
            raise ValueError(
                "sums were taken at other coefficients or another shape; give every replica the coefficients of the "
                "last refit with set_coefficients before a round begins"
            )
        self._buckets += other.buckets
        self._num_steps += other.num_steps

    def set_coefficients(self, coefficients: Coefficients) -> None:
        """Take over coefficients that were fitted elsewhere and start a new round."""
        shapes = (coefficients.slopes.shape, coefficients.intercepts.shape)
        if shapes != ((len(self.feature_names),), (self.num_positions,)) or not coefficients.is_finite():
            raise ValueError(f"need {len(self.feature_names)} finite slopes and {self.num_positions} finite intercepts")
        self.coefficients = coefficients
        self._clear_round()

    def state(self) -> dict[str, Any]:
        """What :meth:`save` writes."""
        return {
            "format": FILE_FORMAT,
            "version": FILE_VERSION,
            "num_positions": self.num_positions,
            "feature_names": list(self.feature_names),
            "slopes": self.coefficients.slopes.tolist(),
            "intercepts": self.coefficients.intercepts.tolist(),
            "num_refits": self.num_refits,
            "num_labels": self.num_labels,
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the fitted state as JSON, atomically: a reader sees the old file or the new one."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=target.name, suffix=".tmp")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump(self.state(), file, indent=1)
            os.replace(temporary, target)
        except BaseException:
            os.unlink(temporary)
            raise

    def load(self, path: str | os.PathLike[str]) -> None:
        """Take over a saved state.

        Raises:
            EstimatorFileError: not such a file, another version, K or feature set, or numbers that are not finite.
        """
        try:
            state = json.loads(Path(path).read_text(encoding="utf-8"))
            found = (state["format"], state["version"], state["num_positions"], tuple(state["feature_names"]))
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
            raise EstimatorFileError(f"{path} is not a saved estimator ({error}); delete it to start afresh") from error
        wanted = (FILE_FORMAT, FILE_VERSION, self.num_positions, self.feature_names)
        for field, got, want in zip(
            ("format", "version", "num_positions", "feature_names"), found, wanted, strict=True
        ):
            if got != want:
                raise EstimatorFileError(f"{path} has {field} {got!r}, this estimator {want!r}; use another file")
        try:
            loaded = [np.array(state[key], dtype=np.float64) for key in ("slopes", "intercepts")]
            self.set_coefficients(Coefficients(*loaded))
            self.num_refits, self.num_labels = int(state["num_refits"]), int(state["num_labels"])
        except (KeyError, TypeError, ValueError) as error:
            raise EstimatorFileError(f"{path} holds no usable coefficients ({error}); delete it") from error


@dataclass(frozen=True, slots=True)
class Exploration:
    """Chooses the small share of requests that a step verifies untrimmed, so that deep positions keep labels.

    The choice is a hash of the request and of how many draws it has made, so it can depend on no drafted token, and
    a later step of the same request draws anew.
    """

    share: float
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse a share that is no share."""
        if not 0 <= self.share <= 1:
            raise ValueError(f"exploration share must be in [0, 1], got {self.share}")

    def untrimmed(self, request_keys: Tensor, draw_counters: Tensor) -> Tensor:
        """``[R]`` int64 request keys and draw counters to ``[R]`` bool."""
        if request_keys.shape != draw_counters.shape:
            raise ValueError(f"{list(request_keys.shape)} request keys but {list(draw_counters.shape)} draw counters")
        keys = request_keys.cpu().numpy().astype(np.int64).view(np.uint64)
        counters = draw_counters.cpu().numpy().astype(np.int64).view(np.uint64)
        mixed = _mix(_mix(keys ^ _mix(np.array([self.seed & (2**64 - 1)], dtype=np.uint64))) ^ counters)
        chosen = (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53 < self.share
        return torch.from_numpy(chosen).to(request_keys.device)


def request_key(text: str) -> int:
    """A stable int64 for a request id or a user name, the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea and Flood, 2014)."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
