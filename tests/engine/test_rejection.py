"""Rejection sampling: equal to its slow twin on the same uniforms, and exact by integration over all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trimtab.engine.rejection import Verification, block_verify, rejection_sample, rejection_sample_reference, residual


class TableLaw:
    """Draft law of a ``[R, K, V]`` table."""

    def __init__(self, probs: Tensor) -> None:
        self.probs = probs

    def full(self, requests: Sequence[int], position: int) -> Tensor:
        return self.probs[list(requests), position]


def call(
    method: Callable[..., Verification], target: Tensor, counts: list[int], drafts: Tensor, q: Tensor, uniforms: Tensor
) -> Verification:
    drawn = q.gather(2, drafts[:, :, None]).squeeze(2)
    return method(lambda rows: target[rows], counts, drafts, drawn, TableLaw(q), uniforms)


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 10**6), vocab_size=st.integers(2, 9), num_requests=st.integers(1, 6), depth=st.integers(1, 5)
)
def test_equals_the_reference_on_the_same_uniforms(seed: int, vocab_size: int, num_requests: int, depth: int) -> None:
    g = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, depth + 1, (num_requests,), generator=g).tolist()
    target = (3 * torch.randn(sum(counts) + num_requests, vocab_size, generator=g)).softmax(-1)
    q = (3 * torch.randn(num_requests, depth, vocab_size, generator=g)).softmax(-1)
    drafts = torch.stack([torch.multinomial(row, 1, generator=g).squeeze(1) for row in q])
    uniforms = torch.rand(num_requests, depth + 1, generator=g, dtype=torch.float64)
    fast = call(rejection_sample, target, counts, drafts, q, uniforms)
    slow = rejection_sample_reference(target, counts, drafts, q, uniforms)
    assert fast.num_accepted.tolist() == slow.num_accepted.tolist()
    assert fast.next_tokens.tolist() == slow.next_tokens.tolist()


def test_rows_past_a_rejection_are_not_computed() -> None:
    target = torch.tensor([[0.0, 1.0], [0.5, 0.5], [0.5, 0.5]])
    asked: list[int] = []

    def law(rows: Tensor) -> Tensor:
        asked.extend(rows.tolist())
        return target[rows]

    q = torch.tensor([[[1.0, 0.0], [1.0, 0.0]]])
    result = rejection_sample(
        law, [2], torch.zeros(1, 2, dtype=torch.int64), torch.ones(1, 2), TableLaw(q), torch.zeros(1, 3).double()
    )
    assert asked == [0]
    assert (result.num_accepted.tolist(), result.next_tokens.tolist()) == ([0], [1])


VOCAB = 3
DEPTH = 2
LOW, HIGH = 1e-12, 1 - 1e-12
Law = Callable[[tuple[int, ...]], Tensor]


def conditional(seed: int) -> Law:
    """A random distribution for each prefix, one of them with a zero."""

    def law(prefix: tuple[int, ...]) -> Tensor:
        g = torch.Generator().manual_seed(seed * 1000 + sum((t + 1) * 4**i for i, t in enumerate(prefix)))
        probs = torch.rand(VOCAB, generator=g, dtype=torch.float64) + 0.05
        if (seed + len(prefix)) % 3 == 0:
            probs[int(torch.randint(0, VOCAB, (1,), generator=g))] = 0.0
        return probs / probs.sum()

    return law


def outcomes(
    method: Callable[..., Verification],
    p: Law,
    q: Tensor,
    x: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Every (probability, emitted tokens) of one draft, with all uniforms integrated.

    Each acceptance uniform has one threshold, found by bisection; the extra token's weights are taken where it would be
    drawn from them.
    """
    target = torch.stack([p(x[:i]) for i in range(len(x) + 1)])
    drafts = torch.tensor([[*x, *[0] * (DEPTH - len(x))]])
    weights: list[Tensor] = []

    def take_weights(probs: Tensor, _uniforms: Tensor) -> Tensor:
        weights.append(probs[0] / probs[0].sum())
        return torch.zeros(1, dtype=torch.int64)

    monkeypatch.setattr("trimtab.engine.rejection.draw", take_weights)

    def run(*us: float) -> int:
        uniforms = torch.tensor([[*us, *[0.0] * (DEPTH - len(us) + 1)]], dtype=torch.float64)
        return int(call(method, target, [len(x)], drafts, q[None], uniforms).num_accepted)

    def pieces(*us: float) -> Iterator[tuple[float, tuple[float, ...]]]:
        if len(us) == len(x):
            yield 1.0, us
            return
        rest = list(product((LOW, HIGH), repeat=len(x) - len(us) - 1))

        def at(u: float) -> list[int]:
            return [run(*us, u, *others) for others in rest]

        threshold, high = 0.0, 1.0
        first = at(LOW)
        if at(HIGH) == first:
            threshold = 1.0
        else:
            while high - threshold > 1e-9:
                middle = (threshold + high) / 2
                threshold, high = (middle, high) if at(middle) == first else (threshold, middle)
        for weight, u in ((threshold, LOW), (1 - threshold, HIGH)):
            if weight > 0:
                for inner, all_us in pieces(*us, u):
                    yield weight * inner, all_us

    for weight, us in pieces():
        weights.clear()
        accepted = run(*us)
        for extra, probability in enumerate(weights[-1].tolist()):
            yield weight * probability, (*x[:accepted], extra)


def completed(emitted: tuple[int, ...], p: Law, length: int) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Plain decoding from an emitted prefix on."""
    if len(emitted) >= length:
        yield 1.0, emitted[:length]
        return
    for token, probability in enumerate(p(emitted).tolist()):
        for weight, tokens in completed((*emitted, token), p, length):
            yield probability * weight, tokens


@pytest.mark.parametrize("length_rule", ["all", "first only", "first token decides"])
@pytest.mark.parametrize("method", [rejection_sample, block_verify])
def test_output_is_distributed_as_the_target(
    method: Callable[..., Verification], length_rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draft two tokens; the second is verified always, never, or only after some first tokens."""
    lengths = {"all": lambda x: 2, "first only": lambda x: 1, "first token decides": lambda x: 2 if x[0] == 1 else 1}
    assert largest_error(method, lengths[length_rule], monkeypatch) < 1e-6


@pytest.mark.parametrize("method", [rejection_sample, block_verify])
def test_the_enumeration_notices_a_length_that_anticipates(
    method: Callable[..., Verification], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert largest_error(method, lambda x: 2 if x[1] == 1 else 1, monkeypatch) > 1e-3


def largest_error(
    method: Callable[..., Verification], length: Callable[[tuple[int, ...]], int], monkeypatch: pytest.MonkeyPatch
) -> float:
    """Largest difference of the probability of any three output tokens from the target's."""
    p, draft_law = conditional(1), conditional(101)
    found: dict[tuple[int, ...], float] = {}
    for x in product(range(VOCAB), repeat=DEPTH):
        q = torch.stack([draft_law(x[:i]) for i in range(DEPTH)])
        weight = float(q[0, x[0]] * q[1, x[1]])
        if weight == 0:
            continue
        for probability, emitted in outcomes(method, p, q, x[: length(x)], monkeypatch):
            for rest, tokens in completed(emitted, p, DEPTH + 1):
                found[tokens] = found.get(tokens, 0.0) + weight * probability * rest
    errors = []
    for tokens in product(range(VOCAB), repeat=DEPTH + 1):
        expected = 1.0
        for i, token in enumerate(tokens):
            expected *= float(p(tokens[:i])[token])
        errors.append(abs(found.get(tokens, 0.0) - expected))
    return max(errors)


def test_block_verification_accepts_at_least_as_much_as_standard() -> None:
    g = torch.Generator().manual_seed(0)
    target = (2 * torch.randn(4, 5, generator=g)).softmax(-1)
    q = (2 * torch.randn(1, 3, 5, generator=g)).softmax(-1)
    totals = [0, 0]
    for _ in range(400):
        drafts = torch.multinomial(q[0], 1, generator=g).T
        uniforms = torch.rand(1, 4, generator=g, dtype=torch.float64)
        for which, method in enumerate((rejection_sample, block_verify)):
            totals[which] += int(call(method, target, [3], drafts, q, uniforms).num_accepted)
    assert totals[1] > totals[0] > 0


def test_equal_laws_leave_no_residual_and_fall_back_to_the_target() -> None:
    p = torch.tensor([[0.25, 0.75]])
    assert torch.equal(residual(p, p.clone()), p)
    assert residual(p, torch.tensor([[0.5, 0.5]])).tolist() == [[0.0, 0.25]]


def test_a_certain_draft_is_accepted_with_its_target_probability() -> None:
    target = torch.tensor([[0.3, 0.7], [0.5, 0.5]])
    q = torch.tensor([[[1.0, 0.0]]])
    drafts = torch.zeros(1, 1, dtype=torch.int64)
    accepted = call(rejection_sample, target, [1], drafts, q, torch.tensor([[0.2999, 0.0]], dtype=torch.float64))
    rejected = call(rejection_sample, target, [1], drafts, q, torch.tensor([[0.3001, 0.0]], dtype=torch.float64))
    assert (accepted.num_accepted.tolist(), rejected.num_accepted.tolist()) == ([1], [0])
    assert rejected.next_tokens.tolist() == [1]
