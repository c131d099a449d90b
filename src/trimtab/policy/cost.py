"""What a step costs: a curve over its tokens, and a model that is profiled at start and corrected while serving.

>>> curve = CostCurve([1, 2, 4, 8], [10.0, 11.0, 12.0, 20.0], staircase=True)
>>> curve(np.array([1, 3, 4, 5])).tolist()
[10.0, 12.0, 12.0, 20.0]
"""

from __future__ import annotations

import json
import os
import tempfile
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]

FILE_FORMAT = "trimtab-cost-model"
FILE_VERSION = 1


class CostFileError(ValueError):
    """A saved cost model does not fit the machine, model or dtype that wants it, or can not be read."""


@dataclass(frozen=True, slots=True, eq=False)
class CostCurve:
    """Milliseconds of a step as a function of all its tokens; non-decreasing.

    Between points it interpolates, or, with ``staircase``, takes the cost of the next point up (an executor that pads
    to buckets). Before the first point it is flat, after the last it goes on with the last slope.
    """

    tokens: Array  # [P] strictly increasing
    ms: Array  # [P] non-decreasing, positive
    staircase: bool = False

    def __init__(self, tokens: ArrayLike, ms: ArrayLike, staircase: bool = False) -> None:
        token_array, ms_array = np.array(tokens, dtype=np.float64), np.array(ms, dtype=np.float64)
        if token_array.ndim != 1 or token_array.shape != ms_array.shape or len(token_array) == 0:
            raise ValueError(
                f"need as many tokens as ms and at least one, got {token_array.shape} and {ms_array.shape}"
            )
        if not (np.isfinite(ms_array) & (ms_array > 0)).all():
            raise ValueError(f"costs must be positive and finite, got {ms_array.tolist()}")
        if (token_array < 0).any() or not (np.diff(token_array) > 0).all():
            raise ValueError(f"tokens must be non-negative and strictly increasing, got {token_array.tolist()}")
        if (np.diff(ms_array) < 0).any():
            raise ValueError(f"a cost curve must not decrease, got {ms_array.tolist()}; see isotonic()")
        self._set(token_array, ms_array, bool(staircase))

    def _set(self, tokens: Array, ms: Array, staircase: bool) -> CostCurve:
        object.__setattr__(self, "tokens", tokens)
        object.__setattr__(self, "ms", ms)
        object.__setattr__(self, "staircase", staircase)
        return self

    @classmethod
    def linear(cls, fixed_ms: float, ms_per_token: float) -> CostCurve:
        """``fixed_ms + ms_per_token * tokens``."""
        return cls([0.0, 1.0], [fixed_ms, fixed_ms + ms_per_token])

    def __call__(self, tokens: ArrayLike) -> Array:
        """Milliseconds, same shape as ``tokens``."""
        wanted = np.asarray(tokens, dtype=np.float64)
        if self.staircase:
            inside = self.ms[np.minimum(np.searchsorted(self.tokens, wanted), len(self.ms) - 1)]
        else:
            inside = np.interp(wanted, self.tokens, self.ms)
        return np.asarray(inside + self._last_slope() * np.maximum(wanted - self.tokens[-1], 0.0))

    def plus(self, ms: float) -> CostCurve:
        """The curve raised by ``ms`` at every size, for what a step pays whatever is verified."""
        return CostCurve(self.tokens, self.ms + ms, self.staircase)

    def bucket_edges(self, start: int, stop: int) -> NDArray[np.int64]:
        """Token counts in [start, stop] after which one more token costs more; ``stop`` is always the last."""
        ms = self(np.arange(start, stop + 1))
        return np.append(start + np.flatnonzero(np.diff(ms) > 0), stop)

    def convex_minorant(self, start: int, stop: int) -> CostCurve:
        """Largest convex curve that nowhere exceeds this one on the whole numbers in [start, stop]."""
        if stop < start:
            raise ValueError(f"need start <= stop, got {start} and {stop}")
        # A piecewise linear curve can only touch its minorant at a knot or an end; a staircase at the ends of buckets.
        knots = np.floor(self.tokens) if self.staircase else np.append(np.floor(self.tokens), np.ceil(self.tokens))
        inner = knots[(knots > start) & (knots < stop)]
        counts = np.unique(np.concatenate(([start], inner, [stop])))
        ms = self(counts)
        while True:  # a point on or above the line between its neighbours is no corner of the minorant
            slopes = np.diff(ms) / np.diff(counts)
            keep = np.concatenate(([True], slopes[1:] > slopes[:-1] * (1 + 1e-12), [True]))[: len(counts)]
            if keep.all():
                # Not checked again: a planner asks for this in every step.
                return object.__new__(CostCurve)._set(counts, ms, False)
            counts, ms = counts[keep], ms[keep]

    def _last_slope(self) -> float:
        """Slope past the last point; a staircase takes that of its upper half, whose steps are the least coarse."""
        if len(self.tokens) == 1:
            return 0.0
        first = len(self.tokens) // 2 - 1 if self.staircase else -2
        return float((self.ms[-1] - self.ms[first]) / (self.tokens[-1] - self.tokens[first]))


def isotonic(values: ArrayLike, weights: ArrayLike | None = None) -> Array:
    """Closest non-decreasing sequence in weighted least squares (pool adjacent violators)."""
    data = np.asarray(values, dtype=np.float64)
    if (data[1:] >= data[:-1]).all():
        return data
    mass = np.ones_like(data) if weights is None else np.asarray(weights, dtype=np.float64)
    pools: list[tuple[float, float, int]] = []  # mean, weight, length
    for value, weight in zip(data.tolist(), mass.tolist(), strict=True):
        pools.append((value, weight, 1))
        while len(pools) > 1 and pools[-2][0] >= pools[-1][0]:
            (left, left_mass, left_size), (right, right_mass, right_size) = pools[-2:]
            total = left_mass + right_mass
            pools[-2:] = [((left * left_mass + right * right_mass) / total, total, left_size + right_size)]
    return np.repeat([pool[0] for pool in pools], [pool[2] for pool in pools])


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a target step is made of, as far as its time goes."""

    num_requests: int  # decoding requests
    num_tokens: int  # tokens of the decoding requests: one each and their admitted drafts
    prefill_tokens: int = 0
    context_tokens: int = 0  # cached tokens that the step attends to, over all its requests

    def __post_init__(self) -> None:
        """Refuse negative sizes."""
        if min(self.num_requests, self.num_tokens, self.prefill_tokens, self.context_tokens) < 0:
            raise ValueError(f"sizes must not be negative, got {self}")

    @property
    def all_tokens(self) -> int:
        """Tokens in the batch."""
        return self.num_tokens + self.prefill_tokens


@dataclass(frozen=True, slots=True)
class CostKey:
    """What a profile is valid for."""

    machine: str
    model: str
    dtype: str


def profile_points(max_requests: int, max_tokens: int, context_tokens: int = 256) -> list[StepShape]:
    """Shapes worth measuring at start: token counts up to the largest step, and three that tell the other terms apart.

    Args:
        max_requests: most requests that decode together.
        max_tokens: most tokens in a step, prefill included.
        context_tokens: context per request in the shapes that measure its cost.
    """
    if max_requests < 1 or max_tokens < 1:
        raise ValueError(f"max_requests and max_tokens must be at least 1, got {max_requests} and {max_tokens}")
    counts = [1]
    while counts[-1] < max_tokens:
        counts.append(min(max_tokens, max(counts[-1] + 1, int(counts[-1] * 1.5))))
    shapes = [StepShape(min(count, max_requests), count) for count in counts]
    wide = min(max_requests, max_tokens)
    shapes.append(StepShape(1, wide))
    shapes.append(StepShape(wide, wide, context_tokens=wide * context_tokens))
    if max_tokens > 1:
        half = max_tokens // 2
        decoding = min(max_requests, max_tokens - half)
        shapes.append(StepShape(decoding, decoding, prefill_tokens=half))
    return shapes


class RobustLinear:
    """Linear regression by recursive least squares on relative errors, deaf to outliers.

    A residual counts at most three times the usual one, so that a stalled step moves little while a lasting change is
    followed within some ten steps. Terms must be scaled so that their weights are of the order of 1.

    Args:
        weights: ``[n]`` start values.
        lower: ``[n]`` least values.
    """

    forgetting = 0.98
    spread = 0.3  # standard deviation of a weight that nothing is known of

    def __init__(self, weights: ArrayLike, lower: ArrayLike) -> None:
        self.weights = np.array(weights, dtype=np.float64)
        self.lower = np.array(lower, dtype=np.float64)
        self.covariance = np.eye(len(self.weights)) * self.spread**2
        self.scale = 0.05  # running mean of clipped relative errors

    def forget_certainty(self) -> None:
        """Keep the weights but take them for as uncertain as at the start, so that they follow what comes now."""
        self.covariance = np.eye(len(self.weights)) * self.spread**2
        self.scale = 0.05

    def predict(self, terms: Array) -> float:
        """Milliseconds of ``terms [n]``."""
        return max(float(self.weights @ terms), 1e-6)

    def observe(self, terms: Array, ms: float) -> float:
        """Move the weights towards an observation; returns the clipped relative error that was made before."""
        predicted = self.predict(terms)
        error = (ms - predicted) / predicted
        clipped = float(np.clip(error, -3 * self.scale, 3 * self.scale))
        self.scale = max(0.95 * self.scale + 0.05 * 1.25 * abs(clipped), 1e-3)
        row = terms / predicted
        gain = self.covariance @ row / (self.scale**2 + row @ self.covariance @ row)
        self.weights = np.maximum(self.weights + gain * clipped, self.lower)
        covariance = (self.covariance - np.outer(gain, row @ self.covariance)) / self.forgetting
        # A weight whose term does not occur must not become ever more uncertain.
        shrink = np.sqrt(np.minimum(1.0, self.spread**2 / np.maximum(np.diag(covariance), 1e-12)))
        self.covariance = covariance * np.outer(shrink, shrink)
        return clipped


class CostModel:
    """Milliseconds of target steps and of drafting: profiled once, corrected by every step that is measured.

    A step costs ``w_0 curve(all tokens) + w_1 requests + w_2 prefill tokens + w_3 context tokens``. The curve is the
    isotonic median of the profile; its knots and the weights follow the measured times.

    Args:
        key: machine, model and dtype of the profile.
        steps: measured ``(shape, ms)``; repeated shapes count by their median.
        drafts: measured ``(requests, draft steps, ms)``; none for drafters that cost nothing.
        buckets: token counts to which the executor pads; None if it does not.
    """

    def __init__(
        self,
        key: CostKey,
        steps: Sequence[tuple[StepShape, float]],
        drafts: Sequence[tuple[int, int, float]] = (),
        buckets: Sequence[int] | None = None,
    ) -> None:
        _check_times([ms for _, ms in steps] + [ms for _, _, ms in drafts])
        self.key = key
        self.buckets = None if buckets is None else tuple(sorted(set(buckets)))
        self.steps, self.drafts = list(steps), list(drafts)
        self.knots, self.knot_ms = _fit_curve(self.steps, self.buckets)
        self.knot_shift = np.zeros(len(self.knots))  # log of the online correction of each knot
        self._base = self._corrected()
        width = max(self.knots[-1] - self.knots[0], 1.0)
        self._unit = max(float(self.knot_ms[-1] - self.knot_ms[0]), 0.01 * float(self.knot_ms[0])) / width
        # Prefill may be cheaper than decoding (no logits are computed), the other terms only add.
        self._regression = RobustLinear([1.0, 0.0, 0.0, 0.0], [0.05, 0.0, -0.9, 0.0])
        for _ in range(8):
            for shape, ms in self.steps:
                self._regression.observe(self._terms(shape), ms)
        self._regression.forget_certainty()
        self._drafting, self._draft_unit = _fit_drafts(self.drafts)
        self._errors: deque[float] = deque(maxlen=256)
        self.measured: deque[tuple[int, float]] = deque(maxlen=256)  # (tokens, ms) of the last observed steps

    @classmethod
    def constant(cls, ms: float = 1.0, ms_per_token: float = 0.0) -> CostModel:
        """A model that is not measured: a step costs ``ms + ms_per_token * tokens``, drafts cost nothing."""
        points = [(StepShape(1, count), ms + ms_per_token * count) for count in (1, 1024)]
        return cls(CostKey("any", "any", "any"), points)

    @property
    def relative_error(self) -> float | None:
        """Median of |measured / predicted - 1| over the last 256 observed steps; None before the first."""
        return float(np.median(self._errors)) if self._errors else None

    def predict(self, shape: StepShape) -> float:
        """Milliseconds of a target step."""
        return self._regression.predict(self._terms(shape))

    def curve(
        self, num_requests: int, prefill_tokens: int = 0, context_tokens: int = 0, extra_ms: float = 0.0
    ) -> CostCurve:
        """Cost of the coming step over all its tokens, prefill included; ``extra_ms`` for drafting and the like."""
        shape = StepShape(num_requests, num_requests, prefill_tokens, context_tokens)
        weights = self._regression.weights
        ms = weights[0] * self._base.ms
        offset = float(weights[1:] @ self._terms(shape)[1:])
        return CostCurve(self.knots, ms + max(offset, -0.9 * float(ms[0])) + extra_ms, self.buckets is not None)

    def observe(self, shape: StepShape, ms: float) -> None:
        """Correct the model by a measured step; times that are not finite or not positive are ignored."""
        if not (np.isfinite(ms) and ms > 0):
            return
        terms = self._terms(shape)
        self._errors.append(abs(ms / self._regression.predict(terms) - 1))
        self.measured.append((shape.all_tokens, ms))
        error = self._regression.observe(terms, ms)
        place = np.interp(shape.all_tokens, self.knots, np.arange(len(self.knots)))
        near = np.maximum(1 - np.abs(np.arange(len(self.knots)) - place), 0.0)
        self.knot_shift = self.knot_shift + near * (0.05 * error - 0.001 * self.knot_shift)
        self._base = self._corrected()

    def draft_ms(self, num_requests: int, num_steps: int) -> float:
        """Milliseconds of drafting ``num_steps`` positions for so many requests; 0 if drafting was not profiled."""
        if self._drafting is None:
            return 0.0
        return self._drafting.predict(_draft_terms(num_requests, num_steps, self._draft_unit))

    def draft_curve(self, num_requests: int, num_positions: int) -> Array:
        """``[K + 1]`` milliseconds of drafting 0..K positions."""
        return np.array([self.draft_ms(num_requests, num_steps) for num_steps in range(num_positions + 1)])

    def observe_draft(self, num_requests: int, num_steps: int, ms: float) -> None:
        """Correct the drafting cost by a measured draft."""
        if not (np.isfinite(ms) and ms > 0):
            return
        if self._drafting is None:
            self._drafting, self._draft_unit = _fit_drafts([(num_requests, num_steps, ms)])
        else:
            self._drafting.observe(_draft_terms(num_requests, num_steps, self._draft_unit), ms)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the profile and what was learned since as JSON, atomically."""
        drafting = self._drafting
        content = {
            "format": FILE_FORMAT,
            "version": FILE_VERSION,
            "key": asdict(self.key),
            "buckets": self.buckets,
            "steps": [[asdict(shape), ms] for shape, ms in self.steps],
            "drafts": self.drafts,
            "knot_shift": self.knot_shift.tolist(),
            "weights": self._regression.weights.tolist(),
            "draft_weights": None if drafting is None or not self.drafts else drafting.weights.tolist(),
        }
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=target.name)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(content, file)
        os.replace(temporary, target)

    @classmethod
    def load(cls, path: str | os.PathLike[str], key: CostKey) -> CostModel:
        """Read a saved model.

        Raises:
            FileNotFoundError: no such file.
            CostFileError: it is of another machine, model, dtype or version, or is damaged.
        """
        try:
            content: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
            if content["format"] != FILE_FORMAT or content["version"] != FILE_VERSION:
                raise CostFileError(f"{path} is {content['format']} {content['version']}, not {FILE_FORMAT} 1")
            if content["key"] != asdict(key):
                raise CostFileError(
                    f"{path} was measured for {content['key']}, not {asdict(key)}; delete it to profile"
                )
            steps = [(StepShape(**shape), float(ms)) for shape, ms in content["steps"]]
            model = cls(key, steps, [tuple(point) for point in content["drafts"]], content["buckets"])
            model._restore(content)
        except CostFileError:
            raise
        except (ValueError, KeyError, TypeError) as error:
            raise CostFileError(f"{path} is damaged ({error}); delete it to profile again") from error
        return model

    def _restore(self, content: dict[str, Any]) -> None:
        for holder, name, saved in (
            (self, "knot_shift", content["knot_shift"]),
            (self._regression, "weights", content["weights"]),
            (self._drafting, "weights", content["draft_weights"]),
        ):
            if holder is None or saved is None:
                continue
            values = np.array(saved, dtype=np.float64)
            if values.shape != getattr(holder, name).shape or not np.isfinite(values).all():
                raise ValueError(f"{name} {saved}")
            setattr(holder, name, values)
        self._base = self._corrected()

    def _corrected(self) -> CostCurve:
        return CostCurve(self.knots, isotonic(self.knot_ms * np.exp(self.knot_shift)), self.buckets is not None)

    def _terms(self, shape: StepShape) -> Array:
        counts = (shape.num_requests, shape.prefill_tokens, 0.01 * shape.context_tokens)
        return np.array([float(self._base(shape.all_tokens)), *(self._unit * count for count in counts)])


def _check_times(times: Sequence[float]) -> None:
    for ms in times:
        if not (np.isfinite(ms) and ms > 0):
            raise ValueError(f"measured times must be positive and finite, got {ms}")


def _fit_curve(steps: Sequence[tuple[StepShape, float]], buckets: tuple[int, ...] | None) -> tuple[Array, Array]:
    """Knots and their milliseconds from the points without prefill and context; at each size, of the most requests."""
    times: dict[int, dict[int, list[float]]] = {}
    for shape, ms in steps:
        if shape.prefill_tokens == 0 and shape.context_tokens == 0:
            size = shape.all_tokens
            if buckets is not None:
                size = next((bucket for bucket in buckets if bucket >= size), size)
            times.setdefault(size, {}).setdefault(shape.num_requests, []).append(ms)
    if not times:
        raise ValueError("the profile needs at least one step without prefill and context; see profile_points()")
    knots = sorted(times)
    medians = [float(np.median(times[knot][max(times[knot])])) for knot in knots]
    counts = [len(times[knot][max(times[knot])]) for knot in knots]
    return np.array(knots, dtype=np.float64), isotonic(medians, counts)


def _draft_terms(num_requests: int, num_steps: int, unit: Array) -> Array:
    return np.array([1.0, num_steps, num_requests, num_steps * num_requests]) * unit


def _fit_drafts(drafts: Sequence[tuple[int, int, float]]) -> tuple[RobustLinear | None, Array]:
    """Drafting costs ``a + b steps + c requests + d steps requests``, all non-negative."""
    if not drafts:
        return None, np.ones(4)
    sizes = np.stack([_draft_terms(requests, num_steps, np.ones(4)) for requests, num_steps, _ in drafts])
    ms = np.array([point[2] for point in drafts])
    unit = np.median(ms) / np.maximum(sizes.mean(0), 1.0)
    regression = RobustLinear(np.full(4, 0.25), np.zeros(4))
    for _ in range(30):
        for row, time in zip(sizes, ms, strict=True):
            regression.observe(row * unit, time)
    regression.forget_certainty()
    return regression, unit
