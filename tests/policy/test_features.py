"""Features of draft distributions: right to float32, stable at the edges, and blind to the slot's own token."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.policy.features import (
    FEATURES,
    LossyFeatureError,
    RecentAcceptance,
    assemble_features,
    draft_features,
    draft_features_from_probs,
    features_reference,
    require_lossless,
    split_features,
)

DISTRIBUTION = [f.name for f in FEATURES.values() if f.source == "distribution"]
LOSSLESS = [name for name in DISTRIBUTION if FEATURES[name].lossless]
TOP = ["logit_q_max", "log_q_max", "neg_log_neg_log_q_max"]


def float64_features(logits, temperatures, tokens):
    """Each feature by its definition, in float64, one row at a time."""
    rows = []
    for row, temperature, token in zip(logits.double(), temperatures.tolist(), tokens.tolist(), strict=True):
        scaled = row / temperature if temperature > 1e-5 else row
        ordered, index = scaled.sort(descending=True, stable=True)

        def about(at, scaled=scaled):
            others = torch.cat((scaled[:at], scaled[at + 1 :])).logsumexp(0)
            log_odds = float(scaled[at] - others)
            negative_log = math.log1p(math.exp(-max(log_odds, -700.0)))
            return log_odds, -negative_log, -math.log(negative_log) if negative_log > 0 else math.inf

        log_probs = scaled.log_softmax(0)
        entropy = -float((log_probs.exp() * log_probs).nan_to_num(0.0).sum())
        of_top, of_token = about(int(index[0])), about(token)
        rows.append([*of_top, float(ordered[0] - ordered[1]), entropy, of_token[0], of_token[1], of_token[2]])
    return torch.tensor(rows, dtype=torch.float64).clamp(-40, 40)


def case(size, seed=0, num_rows=24):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows, size, generator=generator) * 5
    logits[0], logits[0, size // 2] = -1e4, 3.0  # one-hot
    logits[1, 1:] = -math.inf  # one-hot by mask
    logits[2, 0] = logits[2, -1] = 30.0  # a tie
    logits[3, -1] = 28.0  # the top in the last column
    logits[4, ::2] = -math.inf
    logits[5] = 0.0  # uniform
    temperatures = torch.rand(num_rows, generator=generator) * 1.5 + 0.3
    temperatures[::3] = 0.0
    scaled = logits / torch.where(temperatures > 0, temperatures, 1.0)[:, None]
    tokens = torch.multinomial(scaled.softmax(-1), 1, generator=generator)[:, 0]
    return logits, temperatures, tokens


@pytest.mark.parametrize("size", [2, 3, 7, 1000, 49_157])
def test_every_feature_equals_its_float64_definition(size):
    logits, temperatures, tokens = case(size)
    expected = float64_features(logits, temperatures, tokens)
    found = draft_features(logits, temperatures, DISTRIBUTION, tokens)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, atol=2e-4, rtol=1e-5)
    fast = draft_features(logits, temperatures, LOSSLESS)  # a path of its own
    torch.testing.assert_close(fast.double(), expected[:, : len(LOSSLESS)], atol=2e-4, rtol=1e-5)


@pytest.mark.parametrize("size", [2, 5, 1000])
def test_fast_path_equals_the_reference(size):
    logits, temperatures, _ = case(size, seed=1)
    scaled = logits / torch.where(temperatures > 0, temperatures, 1.0)[:, None]
    probs = scaled.softmax(-1)
    for names in (TOP, LOSSLESS):
        expected = features_reference(probs, None, names, None)
        torch.testing.assert_close(draft_features_from_probs(probs, names), expected, atol=2e-4, rtol=1e-5)
        torch.testing.assert_close(draft_features(logits, temperatures, names), expected, atol=2e-4, rtol=1e-5)


def test_features_from_probs_equal_those_from_logits():
    logits, temperatures, tokens = case(501, seed=2)
    scaled = logits / torch.where(temperatures > 0, temperatures, 1.0)[:, None]
    found = draft_features_from_probs(scaled.softmax(-1), DISTRIBUTION, tokens)
    torch.testing.assert_close(found, draft_features(logits, temperatures, DISTRIBUTION, tokens), atol=1e-4, rtol=1e-5)


def test_bfloat16_logits_read_as_their_float32_values():
    logits, temperatures, tokens = case(300, seed=3)
    rounded = logits.bfloat16()
    found = draft_features(rounded, temperatures, DISTRIBUTION, tokens)
    torch.testing.assert_close(found, draft_features(rounded.float(), temperatures, DISTRIBUTION, tokens))


def test_near_certainty_is_resolved_past_what_one_minus_q_could_tell():
    margins = torch.tensor([5.0, 12.0, 20.0, 35.0, 39.0, 60.0])
    logits = torch.stack((margins, torch.zeros(6)), dim=1)
    found = draft_features(logits, torch.ones(6), ["logit_q_max"])[:, 0]
    torch.testing.assert_close(found, margins.clamp_max(40.0), atol=1e-4, rtol=1e-5)


def test_temperature_zero_reads_the_unscaled_logits():
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    greedy, plain = (draft_features(logits, torch.full((4,), t), LOSSLESS) for t in (0.0, 1.0))
    assert torch.equal(greedy, plain)
    halved = draft_features(logits, torch.full((4,), 0.5), LOSSLESS)
    torch.testing.assert_close(halved, draft_features(2 * logits, torch.ones(4), LOSSLESS))
    assert not torch.allclose(halved, plain)


def test_a_broken_row_gives_nan_and_leaves_the_others_alone():
    logits = torch.randn(4, 60, generator=torch.Generator().manual_seed(0))
    whole = draft_features(logits, torch.ones(4), LOSSLESS)
    logits[1, 5], logits[2] = math.nan, -math.inf
    for names in (LOSSLESS, TOP):
        found = draft_features(logits, torch.ones(4), names)
        assert found[1:3].isnan().all()
        torch.testing.assert_close(found[[0, 3]], whole[[0, 3]][:, : len(names)])


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.lists(st.floats(-200, 200, width=32), min_size=6, max_size=6), min_size=1, max_size=4),
    temperature=st.floats(0, 3),
)
def test_features_are_finite_and_within_the_limit(rows, temperature):
    logits = torch.tensor(rows)
    found = draft_features(logits, torch.full((len(rows),), temperature), LOSSLESS)
    assert found.isfinite().all()
    assert (found.abs() <= 40).all()


def test_lossless_features_do_not_move_with_the_drawn_token_and_lossy_ones_do():
    logits = torch.randn(3, 20, generator=torch.Generator().manual_seed(0))
    first, second = (draft_features(logits, torch.ones(3), DISTRIBUTION, torch.full((3,), token)) for token in (4, 11))
    for column, name in enumerate(DISTRIBUTION):
        assert torch.equal(first[:, column], second[:, column]) == FEATURES[name].lossless, name


def test_context_features_of_a_slot_read_earlier_draws_only():
    names = ("log_q_previous", "logit_q_max", "sum_log_q_previous", "request_acceptance", "is_greedy")
    distribution = torch.randn(2, 5, 1)
    log_q = -torch.rand(2, 5)
    acceptance, greedy = torch.tensor([0.3, -1.0]), torch.tensor([True, False])
    found = assemble_features(names, distribution, log_q, acceptance, greedy)
    torch.testing.assert_close(found[:, 1:, 0], log_q[:, :-1])
    assert torch.equal(found[:, 0, 0], torch.zeros(2))
    torch.testing.assert_close(found[:, 3, 2], log_q[:, :3].sum(1))
    assert torch.equal(found[..., 1], distribution[..., 0])
    assert torch.equal(found[0, :, 4], torch.ones(5))
    for position in range(5):
        changed = log_q.clone()
        changed[:, position:] = -7.0
        after = assemble_features(names, distribution, changed, acceptance, greedy)
        assert torch.equal(after[:, : position + 1], found[:, : position + 1])


def test_lossy_features_are_refused_by_name():
    require_lossless([f.name for f in FEATURES.values() if f.lossless])
    for feature in FEATURES.values():
        if not feature.lossless:
            with pytest.raises(LossyFeatureError, match=feature.name):
                require_lossless(["logit_q_max", feature.name])


def test_recent_acceptance_starts_at_the_prior_and_follows_the_request():
    recent = RecentAcceptance()
    assert recent.logit(0.8) == pytest.approx(math.log(4))
    for _ in range(50):
        recent.observe(num_verified=4, num_accepted=0)
    assert recent.logit(0.8) < -0.5
    for _ in range(50):
        recent.observe(num_verified=4, num_accepted=4)
    assert recent.logit(0.8) > 2


def test_the_softmax_can_be_kept_for_the_sampler():
    logits, temperatures, _ = case(200_001, seed=4)
    probs = torch.empty_like(logits)
    found = draft_features(logits, temperatures, TOP, probs_out=probs)
    scaled = logits / torch.where(temperatures > 0, temperatures, 1.0)[:, None]
    torch.testing.assert_close(probs, scaled.softmax(-1))
    assert torch.equal(found, draft_features(logits, temperatures, TOP))
    with pytest.raises(ValueError, match="probs_out must be float32"):
        draft_features(logits, temperatures, TOP, probs_out=probs.double())


def test_empty_batch_gives_an_empty_result():
    assert draft_features(torch.empty(0, 9), torch.empty(0), ["logit_q_max", "entropy"]).shape == (0, 2)
    assert draft_features_from_probs(torch.empty(0, 9), ["logit_q_max"]).shape == (0, 1)


def test_split_keeps_the_order():
    assert split_features(["is_greedy", "entropy", "log_q_previous", "logit_q_max"]) == (
        ("entropy", "logit_q_max"),
        ("is_greedy", "log_q_previous"),
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: draft_features(torch.zeros(2, 3), torch.ones(3), ["entropy"]), r"temperatures must be \[2\]"),
        (lambda: draft_features(torch.zeros(2, 3), torch.tensor([1.0, -1.0]), ["entropy"]), "negative, got -1"),
        (lambda: draft_features(torch.zeros(2, 0), torch.ones(2), ["entropy"]), "V > 0"),
        (lambda: draft_features(torch.zeros(2, 3, 4), torch.ones(2), ["entropy"]), r"\[N, V\]"),
        (lambda: draft_features(torch.zeros(2, 3), torch.ones(2), ["entrpy"]), 'did you mean "entropy"'),
        (lambda: draft_features(torch.zeros(2, 3), torch.ones(2), ["is_greedy"]), "assemble_features"),
        (lambda: draft_features(torch.zeros(2, 3), torch.ones(2), ["logit_q_sampled"]), "needs drafted_tokens"),
        (lambda: assemble_features(["entropy", "is_greedy"], torch.zeros(2, 3, 1)), "is_greedy"),
        (lambda: assemble_features(["entropy"], torch.zeros(2, 3, 2)), r"\[R, K, 1\]"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
