"""Sampling laws against transformers' logits processors, and draws against their definition."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from trimtab.engine.request import DrawCounter
from trimtab.engine.sampling import RowSettings, adjust_logits, argmax, draw, sampling_probs
from trimtab.engine.sampling_params import SamplingParams


def transformers_law(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    scores = TemperatureLogitsWarper(params.temperature)(None, logits[None])
    if params.top_k > 0:
        scores = TopKLogitsWarper(params.top_k)(None, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(None, scores)
    if params.min_p > 0:
        scores = MinPLogitsWarper(params.min_p)(None, scores)
    return scores.softmax(-1)[0]


@pytest.mark.parametrize("vocab_size", [7, 129, 5000])
@pytest.mark.parametrize("scale", [0.05, 1.0, 6.0])
def test_a_mixed_batch_follows_the_law_of_transformers_row_by_row(vocab_size: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    params = [
        SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m)
        for t in (0.3, 1.0, 1.7)
        for k in (0, 1, 5, 3000)
        for p in (1.0, 0.95, 0.3)
        for m in (0.0, 0.1)
    ]
    logits = scale * torch.randn(len(params), vocab_size, generator=generator)
    probs = sampling_probs(logits, RowSettings.of(params))
    for row, one in enumerate(params):
        torch.testing.assert_close(probs[row], transformers_law(logits[row], one), atol=2e-6, rtol=2e-5)
    truncated = (probs == 0).any(-1)
    assert truncated.any()
    assert not truncated.all()


def test_a_flat_row_that_needs_more_than_every_candidate_tier_is_still_exact() -> None:
    logits = torch.linspace(0, 0.01, 4000)[torch.randperm(4000, generator=torch.Generator().manual_seed(0))]
    params = SamplingParams(temperature=1.0, top_p=0.9)
    probs = sampling_probs(logits[None], RowSettings.of([params]))[0]
    torch.testing.assert_close(probs, transformers_law(logits, params), atol=1e-8, rtol=1e-3)


def test_temperature_zero_is_certain_of_the_largest_logit_beside_sampled_rows() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    params = [SamplingParams(temperature=0), SamplingParams(top_p=0.5), SamplingParams(temperature=0)]
    probs = sampling_probs(logits, RowSettings.of(params))
    for row in (0, 2):
        assert probs[row].sum() == 1
        assert probs[row].argmax() == logits[row].argmax()
    assert 0 < probs[1].max() < 1


def test_impossible_tokens_stay_impossible() -> None:
    logits = torch.full((2, 300), float("-inf"))
    logits[:, [3, 200]] = torch.tensor([1.0, 2.0])
    probs = sampling_probs(logits, RowSettings.of([SamplingParams(), SamplingParams(top_p=0.99, top_k=7)]))
    assert probs.nonzero()[:, 1].tolist() == [3, 200, 3, 200]


def test_repetition_penalty_is_that_of_transformers_and_sees_prompt_and_output() -> None:
    logits = torch.randn(40, generator=torch.Generator().manual_seed(2))
    tokens = [3, 5, 5, 9]
    params = SamplingParams(repetition_penalty=1.4)
    expected = RepetitionPenaltyLogitsProcessor(1.4)(torch.tensor([tokens]), logits[None].clone())[0]
    torch.testing.assert_close(adjust_logits(logits, params, tokens, prompt_len=2), expected)


def test_openai_penalties_count_output_tokens_only_by_the_published_formula() -> None:
    logits = torch.zeros(10)
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25, logit_bias={7: 2.0})
    adjusted = adjust_logits(logits, params, [1, 1, 4, 6, 6, 6], prompt_len=2)
    expected = torch.zeros(10)
    expected[4] = -0.5 - 0.25
    expected[6] = -0.5 - 3 * 0.25
    expected[7] = 2.0
    torch.testing.assert_close(adjusted, expected)
    assert (logits == 0).all(), "the input must not change"


def test_stop_tokens_are_banned_until_min_tokens_are_out() -> None:
    params = SamplingParams(min_tokens=2)
    early = adjust_logits(torch.zeros(5), params, [1, 1, 2], prompt_len=2, stop_ids=(4,))
    late = adjust_logits(torch.zeros(5), params, [1, 1, 2, 2], prompt_len=2, stop_ids=(4,))
    assert early[4] == float("-inf")
    assert late[4] == 0


@settings(max_examples=60, deadline=None)
@given(
    weights=st.lists(st.integers(0, 5), min_size=1, max_size=400).filter(any),
    uniform=st.floats(0, 1, exclude_max=True),
)
def test_a_draw_inverts_the_distribution_function(weights: list[int], uniform: float) -> None:
    token = int(draw(torch.tensor([weights], dtype=torch.float32), torch.tensor([uniform], dtype=torch.float64))[0])
    goal = uniform * sum(weights)
    assert weights[token] > 0
    assert sum(weights[:token]) <= goal + 1e-9
    assert goal < sum(weights[: token + 1]) + 1e-9


def test_draws_over_a_real_vocabulary_have_the_right_frequencies() -> None:
    probs = torch.zeros(1, 49152)
    probs[0, [0, 127, 128, 49151]] = torch.tensor([0.1, 0.2, 0.3, 0.4])
    counts = torch.zeros(49152, dtype=torch.int64)
    for portion in torch.rand(40, 100, generator=torch.Generator().manual_seed(0), dtype=torch.float64):
        counts += draw(probs.expand(100, -1), portion).bincount(minlength=49152)
    expected = 4000 * probs[0, [0, 127, 128, 49151]]
    found = counts[[0, 127, 128, 49151]]
    assert counts.sum() == found.sum()
    assert float(((found - expected) ** 2 / expected).sum()) < 16.27  # chi-square, 3 degrees of freedom, p = .001


def test_argmax_finds_the_first_nan() -> None:
    assert argmax(torch.tensor([[1.0, float("nan"), 9.0], [3.0, 2.0, 1.0]])).tolist() == [1, 0]


def test_a_draw_counter_gives_the_same_numbers_in_any_portions() -> None:
    whole, parts = DrawCounter(7), DrawCounter(7)
    numbers = whole.draw(200)
    assert [x for count in (1, 99, 0, 3, 97) for x in parts.draw(count)] == numbers
    assert parts.num_drawn == whole.num_drawn == 200
    assert len(set(numbers)) == 200
    assert DrawCounter(8).draw(200) != numbers


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", 1.5),
        ("n", 0),
        ("max_tokens", 0),
        ("presence_penalty", 3),
        ("repetition_penalty", 0),
        ("logprobs", 21),
        ("stop", [""]),
        ("stop_token_ids", [-1]),
        ("logit_bias", {3: 101}),
        ("min_tokens", 99),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: value})  # type: ignore[arg-type]
