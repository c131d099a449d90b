"""Exact checks that trimming leaves the output alone, for anyone's planner, confidence source or depth rule.

:func:`output_distribution` walks every draft, acceptance and residual of a tiny model with rational numbers and returns
the exact law of the generated tokens. :func:`check_planner` puts a planner through random tiny models and raises with
the total-variation distance if that law is not the target's.

>>> from trimtab.policy.planner import make_planner
>>> check_planner(make_planner("stale"), seeds=range(3))
"""

from __future__ import annotations

import copy
import functools
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
import torch

from trimtab.policy.confidence import ConfidenceSource, DraftSignals, survival_probs
from trimtab.policy.cost import CostCurve
from trimtab.policy.depth import DepthInput, DepthRule, RevealDepth
from trimtab.policy.estimator import VerificationOutcome
from trimtab.policy.features import draft_features_from_probs
from trimtab.policy.planner import FixedPlanner, Planner
from trimtab.policy.reveal import Array, Counts, PlanInput, PlannerHistory, update_history

Tokens = tuple[int, ...]
Law = tuple[Fraction, ...]
Texts = tuple[Tokens, ...]  # what each request has emitted
Scorer = Callable[["TinyModel", int, Tokens, Tokens], Sequence[float]]
"""(model, request, emitted tokens, drafted tokens) to the confidence of each drafted slot. A lossless scorer computes
that of slot i from the tokens before i only."""
DepthChoice = Callable[[DepthInput, Callable[[int], Array]], tuple[int, Counts | None]]
"""(input, survival ``[R]`` of a position as soon as it is drafted) to the depth and the slots committed on the way."""


@dataclass(frozen=True)
class TinyModel:
    """Target and draft laws of every request after every text, and the step that they are decoded in."""

    vocab_size: int
    num_positions: int
    num_requests: int
    target_probs: Callable[[int, Tokens], Law]
    draft_probs: Callable[[int, Tokens], Law]
    confidence: Callable[[int, Tokens], float]  # of a draft made after this text; need not be calibrated
    cost: CostCurve
    history: PlannerHistory
    max_verified_tokens: int | None = None
    forced: tuple[bool, ...] | None = None
    draft_ms: float = 0.0  # per drafted position

    @classmethod
    def random(cls, seed: int, vocab_size: int = 2, num_positions: int = 2, num_requests: int = 1) -> TinyModel:
        """A model with coarse probabilities and confidences, so that ties and certainties occur, and some history."""

        def rng_of(*key: object) -> random.Random:
            return random.Random(repr((seed, *key)))

        @functools.cache
        def law(*key: object) -> Law:
            rng = rng_of(*key)
            weights = [rng.choice((0, 1, 1, 2, 3, 5)) for _ in range(vocab_size)]
            weights[rng.randrange(vocab_size)] += 1
            return tuple(Fraction(weight, sum(weights)) for weight in weights)

        @functools.cache
        def confidence(request: int, text: Tokens) -> float:
            return rng_of("confidence", request, text).choice((0.0, 0.2, 0.5, 0.5, 0.9, 1.0))

        rng = rng_of("step")
        size = num_requests * (1 + num_positions)
        steps = np.cumsum([rng.choice((0.0, 0.0, 0.1, 0.5, 1.0)) for _ in range(size)])
        history = PlannerHistory.start(num_positions)
        model = cls(
            vocab_size,
            num_positions,
            num_requests,
            target_probs=lambda request, text: law("target", request, text),
            draft_probs=lambda request, text: law("draft", request, text),
            confidence=confidence,
            cost=CostCurve(np.arange(1, size + 1), rng.choice((1.0, 2.0)) + steps, staircase=True),
            history=history,
            max_verified_tokens=rng.choice((None, None, num_requests * num_positions - 1)),
            forced=tuple(rng.random() < 0.15 for _ in range(num_requests)),
            draft_ms=rng.choice((0.0, 0.1, 0.3)),
        )
        generator = np.random.default_rng(seed)
        for _ in range(seed % 3):
            survival = generator.random((num_requests, num_positions)).cumprod(1)
            inputs = model.plan_input(survival, np.full(num_requests, num_positions), history)
            history = update_history(history, inputs, FixedPlanner().plan(inputs))
        return replace(model, history=history)

    def plan_input(
        self, survival: Array, num_drafted: Counts, history: PlannerHistory, committed: Counts | None = None
    ) -> PlanInput:
        """What a planner is given."""
        return PlanInput(
            survival,
            num_drafted,
            self.num_requests,
            self.cost,
            history,
            self.max_verified_tokens,
            None if self.forced is None else np.array(self.forced),
            committed,
        )


def table_scorer(model: TinyModel, request: int, text: Tokens, drafts: Tokens) -> list[float]:
    """The model's own confidences: each depends on the text before its slot."""
    return [model.confidence(request, text + drafts[:position]) for position in range(len(drafts))]


def drawn_token_scorer(model: TinyModel, request: int, text: Tokens, drafts: Tokens) -> list[float]:
    """The draft probability of each slot's own drawn token. Anticipates: it must fail under any planner that trims."""
    prefixes = [text + drafts[:position] for position in range(len(drafts))]
    return [float(model.draft_probs(request, prefix)[token]) for prefix, token in zip(prefixes, drafts, strict=True)]


def output_distribution(
    model: TinyModel,
    planner: Planner | Sequence[Planner],
    *,
    scorer: Scorer | ConfidenceSource = table_scorer,
    depth: DepthRule | RevealDepth | DepthChoice | None = None,
    steps: int = 1,
    length: int | None = None,
) -> dict[Texts, Fraction]:
    """Exact joint law of the first ``length`` tokens of every request after ``steps`` steps of speculative decoding.

    Texts that are shorter by then are completed by sampling from the target, as plain decoding would.

    Args:
        model: laws, costs and what else a step needs.
        planner: a planner, or several among which fresh noise chooses with equal chances.
        scorer: where confidences come from; a ConfidenceSource reads features of the draft laws, and learns.
        depth: how deep to draft; K if None.
        steps: steps of drafting and verification.
        length: tokens compared per request; K + 1 by default.
    """
    planners = [planner] if isinstance(planner, Planner) else list(planner)
    length = model.num_positions + 1 if length is None else length
    texts: Texts = ((),) * model.num_requests
    states: list[tuple[Texts, PlannerHistory, Scorer | ConfidenceSource, Fraction]]
    states = [(texts, model.history, scorer, Fraction(1))]
    for _ in range(steps):
        after: dict[object, tuple[Texts, PlannerHistory, Scorer | ConfidenceSource, Fraction]] = {}
        for texts, history, source, chance in states:
            for branch, (drafts, draft_chance) in enumerate(_joint_drafts(model, texts)):
                seen = copy.deepcopy(source) if isinstance(source, ConfidenceSource) else source
                for choice, rule in enumerate(planners):
                    outcome = _one_step(model, rule, seen, depth, history, texts, drafts)
                    for texts_after, outcome_chance, learned in outcome.results:
                        total = chance * draft_chance * outcome_chance / len(planners)
                        # One draft gives one history; only texts that came from the same draft may be merged.
                        key = (id(history), id(source), branch, choice, texts_after)
                        total += after[key][3] if key in after else 0
                        after[key] = (texts_after, outcome.history, learned, total)
        states = list(after.values())
    result: dict[Texts, Fraction] = {}
    for texts, _, _, chance in states:
        for complete, rest in _completions(model, texts, length):
            result[complete] = result.get(complete, Fraction(0)) + chance * rest
    return result


def target_distribution(model: TinyModel, length: int | None = None) -> dict[Texts, Fraction]:
    """Joint law of ``length`` tokens per request sampled from the target alone."""
    length = model.num_positions + 1 if length is None else length
    return dict(_completions(model, ((),) * model.num_requests, length))


def total_variation(first: Mapping[Texts, Fraction], second: Mapping[Texts, Fraction]) -> Fraction:
    """Half the sum of absolute differences."""
    differences = (abs(first.get(key, Fraction(0)) - second.get(key, Fraction(0))) for key in {*first, *second})
    return sum(differences, Fraction(0)) / 2


CHECK_SIZES = ((2, 2, 1, 1), (2, 2, 2, 1), (3, 2, 1, 1), (2, 3, 1, 1), (2, 1, 2, 2), (2, 2, 1, 2))


def check_planner(
    planner: Planner | Sequence[Planner],
    *,
    scorer: Scorer | ConfidenceSource | None = None,
    make_source: Callable[[int], ConfidenceSource] | None = None,
    depth: DepthRule | RevealDepth | DepthChoice | None = None,
    seeds: Iterable[int] = range(20),
    sizes: Sequence[tuple[int, int, int, int]] = CHECK_SIZES,
) -> None:
    """Enumerate random tiny models and compare with the target, which must be met exactly.

    Args:
        planner: what is checked, see :func:`output_distribution`.
        scorer: confidences; the model's own table by default.
        make_source: makes a fresh confidence source for K positions; instead of ``scorer``.
        depth: draft depth rule.
        seeds: one random model per seed and size.
        sizes: ``(vocab size, K, requests, steps)``.

    Raises:
        AssertionError: the output is not distributed as the target; names the model and the distance.
    """
    for seed, (vocab_size, num_positions, num_requests, steps) in itertools.product(seeds, sizes):
        model = TinyModel.random(seed, vocab_size, num_positions, num_requests)
        source = make_source(num_positions) if make_source else scorer or table_scorer
        law = output_distribution(model, planner, scorer=source, depth=depth, steps=steps, length=num_positions + 1)
        distance = total_variation(law, target_distribution(model))
        if distance:
            names = {rule.name for rule in ([planner] if isinstance(planner, Planner) else planner)}
            raise AssertionError(
                f"{', '.join(sorted(names))} changes the output: total variation {float(distance):.6f} from the target "
                f"(seed {seed}, V = {vocab_size}, K = {num_positions}, R = {num_requests}, steps = {steps})"
            )


def check_non_anticipation(planner: Planner, inputs: PlanInput, seed: int = 0, trials: int = 8) -> None:
    """A plan must come from what a sequential reveal has seen when it stops: two properties of the planner.

    Of each request alone: whether slot (r, i) is admitted does not change with the survival of later positions of r.
    Of all together: the plan does not change when survival past every request's first refused slot changes at once.
    The first does not imply the second: of two requests, each may be verified by what the other's last slot shows, and
    then their outputs are correlated.

    Args:
        planner: what is checked.
        inputs: a step to start from; its survival is replaced position by position.
        seed: of the replacements.
        trials: replacements per slot; among them 0 and the largest value that is allowed.

    Raises:
        AssertionError: names the slot that moved, or both plans.
    """
    rng = np.random.default_rng(seed)
    counts = planner.plan(inputs).num_verified
    for request, drafted in enumerate(inputs.num_drafted):
        for position in range(int(drafted) - 1):
            for trial in range(trials):
                survival = _with_new_tail(inputs.survival, request, position, trial, rng)
                changed = planner.plan(replace(inputs, survival=survival)).num_verified
                before, after = (min(int(plan[request]), position + 1) for plan in (counts, changed))
                if before != after:
                    raise AssertionError(
                        f"{planner.name} anticipates: of request {request}, {before} of the first {position + 1} slots "
                        f"were admitted, but {after} after survival past position {position} became {survival[request]}"
                    )
    for trial in range(trials):
        survival = inputs.survival
        for request, count in enumerate(counts):
            survival = _with_new_tail(survival, request, int(count), trial, rng)
        changed = planner.plan(replace(inputs, survival=survival)).num_verified
        if (changed != counts).any():
            raise AssertionError(
                f"{planner.name} anticipates: it admitted {counts.tolist()}, but {changed.tolist()} after survival "
                f"past the first refused slot of every request became {survival.tolist()}"
            )


def _with_new_tail(survival: Array, request: int, position: int, trial: int, rng: np.random.Generator) -> Array:
    """A copy in which survival of ``request`` past ``position`` is 0, the most it can be, or random."""
    survival = survival.copy()
    tail = rng.choice((rng.random(), 0.5, 1.0), size=len(survival[request, position + 1 :])).cumprod()
    tail = (np.zeros_like(tail), np.ones_like(tail), tail)[min(trial, 2)]
    survival[request, position + 1 :] = survival[request, position : position + 1] * tail
    return survival


@dataclass(frozen=True)
class _Step:
    history: PlannerHistory
    results: list[tuple[Texts, Fraction, Scorer | ConfidenceSource]]


def _one_step(
    model: TinyModel,
    planner: Planner,
    source: Scorer | ConfidenceSource,
    depth: DepthRule | RevealDepth | DepthChoice | None,
    history: PlannerHistory,
    texts: Texts,
    drafts: Texts,
) -> _Step:
    """Plan and verify one joint draft; every outcome with its chance."""
    signals = None
    if isinstance(source, ConfidenceSource):
        signals = _signals(model, source, texts, drafts)
        confidences = source.confidence(signals)
    else:
        rows = [source(model, r, text, draft) for r, (text, draft) in enumerate(zip(texts, drafts, strict=True))]
        confidences = torch.tensor([list(row) for row in rows])
    num_drafted = torch.full((model.num_requests,), model.num_positions)
    survival = survival_probs(confidences, num_drafted).double().numpy()
    reached, committed = _choose_depth(model, depth, history, survival)
    survival = np.where(np.arange(model.num_positions) < reached, survival, 0.0)
    inputs = model.plan_input(survival, np.full(model.num_requests, reached), history, committed)
    plan = planner.plan(inputs)
    results: list[tuple[Texts, Fraction, Scorer | ConfidenceSource]] = []
    outcomes = [
        list(_verify(model, request, texts[request], drafts[request][: int(count)]))
        for request, count in enumerate(plan.num_verified)
    ]
    for joint in itertools.product(*outcomes):
        chance = Fraction(1)
        for _, part in joint:
            chance *= part
        learned = source
        if isinstance(source, ConfidenceSource) and signals is not None:
            learned = copy.deepcopy(source)
            accepted = [len(emitted) - len(text) - 1 for (emitted, _), text in zip(joint, texts, strict=True)]
            teaches = torch.ones(model.num_requests, dtype=torch.bool)
            counts = torch.from_numpy(plan.num_verified)
            learned.observe(signals, VerificationOutcome(counts, torch.tensor(accepted), teaches))
        results.append((tuple(emitted for emitted, _ in joint), chance, learned))
    return _Step(update_history(history, inputs, plan), results)


def _choose_depth(
    model: TinyModel,
    depth: DepthRule | RevealDepth | DepthChoice | None,
    history: PlannerHistory,
    survival: Array,
) -> tuple[int, Counts | None]:
    if depth is None:
        return model.num_positions, None
    draft_ms = model.draft_ms * np.arange(model.num_positions + 1, dtype=np.float64)
    inputs = DepthInput(model.num_requests, model.num_requests, model.cost, draft_ms, history)
    if isinstance(depth, RevealDepth):
        state = depth.start(inputs)
        while state.another:
            state = depth.advance(state, inputs, survival[:, state.num_drafted])
        return state.num_drafted, state.committed
    if isinstance(depth, DepthRule):
        return depth.depth(inputs), None
    return depth(inputs, lambda position: survival[:, position])


def _joint_drafts(model: TinyModel, texts: Texts) -> Iterator[tuple[Texts, Fraction]]:
    for drafts in itertools.product(
        itertools.product(range(model.vocab_size), repeat=model.num_positions), repeat=model.num_requests
    ):
        chance = Fraction(1)
        for request, (text, draft) in enumerate(zip(texts, drafts, strict=True)):
            for position, token in enumerate(draft):
                chance *= model.draft_probs(request, text + draft[:position])[token]
        if chance:
            yield drafts, chance


def _verify(model: TinyModel, request: int, text: Tokens, drafts: Tokens) -> Iterator[tuple[Tokens, Fraction]]:
    """Rejection sampling of an admitted draft: every emitted text with its chance."""
    alive = Fraction(1)
    for position, token in enumerate(drafts):
        prefix = text + drafts[:position]
        target, draft = model.target_probs(request, prefix), model.draft_probs(request, prefix)
        accept = min(Fraction(1), target[token] / draft[token])
        residual = [max(Fraction(0), p - q) for p, q in zip(target, draft, strict=True)]
        if accept < 1:
            for other, mass in enumerate(residual):
                if mass:
                    yield (*prefix, other), alive * (1 - accept) * mass / sum(residual)
        alive *= accept
    for token, mass in enumerate(model.target_probs(request, text + drafts)):
        if alive * mass:
            yield (*text, *drafts, token), alive * mass


def _completions(model: TinyModel, texts: Texts, length: int) -> Iterator[tuple[Texts, Fraction]]:
    def of_one(request: int, text: Tokens) -> Iterator[tuple[Tokens, Fraction]]:
        if len(text) >= length:
            yield text[:length], Fraction(1)
            return
        for token, mass in enumerate(model.target_probs(request, text)):
            if mass:
                for complete, rest in of_one(request, (*text, token)):
                    yield complete, mass * rest

    for joint in itertools.product(*(list(of_one(request, text)) for request, text in enumerate(texts))):
        chance = Fraction(1)
        for _, part in joint:
            chance *= part
        yield tuple(complete for complete, _ in joint), chance


def _signals(model: TinyModel, source: ConfidenceSource, texts: Texts, drafts: Texts) -> DraftSignals:
    """What an engine would hand to the source: features of the draft laws, and head logits."""
    prefixes = [
        (request, text + draft[:position])
        for request, (text, draft) in enumerate(zip(texts, drafts, strict=True))
        for position in range(model.num_positions)
    ]
    shape = (model.num_requests, model.num_positions)
    probs = torch.tensor([[float(mass) for mass in model.draft_probs(*prefix)] for prefix in prefixes])
    names = source.feature_names
    features = draft_features_from_probs(probs, names).reshape(*shape, -1) if names else torch.zeros(*shape, 0)
    head = torch.tensor([4 * model.confidence(*prefix) - 2 for prefix in prefixes]).reshape(shape)
    return DraftSignals(features, torch.full(shape[:1], shape[1]), probs.max(-1).values.reshape(shape), head)
