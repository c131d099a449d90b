"""Confidence sources: one protocol, six sources, and survival that never rises along a request."""

import re
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from sklearn.linear_model import LogisticRegression

import trimtab.policy
from trimtab.policy import confidence as module
from trimtab.policy.confidence import (
    BUILTIN_CONFIDENCES,
    TEMPERATURE_GRID,
    ConfidenceSource,
    DraftSignals,
    FixedConfidence,
    HeadConfidence,
    TrainedConfidence,
    confidence_names,
    fit_temperature,
    make_confidence,
    survival_probs,
)
from trimtab.policy.estimator import AcceptanceEstimator, EstimatorFileError, VerificationOutcome
from trimtab.policy.features import LossyFeatureError
from trimtab.policy.quality import calibration_error


def signals(num_requests=4, num_positions=3, num_features=1, head=True, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (num_requests, num_positions)
    return DraftSignals(
        features=torch.randn(*shape, num_features, generator=generator),
        num_drafted=torch.full((num_requests,), num_positions),
        q_max=torch.rand(shape, generator=generator),
        head_logits=torch.randn(shape, generator=generator) if head else None,
    )


def judged(num_verified, num_accepted, teaches=True):
    verified = torch.as_tensor(num_verified)
    return VerificationOutcome(verified, torch.as_tensor(num_accepted), torch.full(verified.shape, teaches))


def every_source(tmp_path):
    path = tmp_path / "trained.json"
    AcceptanceEstimator(3).save(path)
    options = {"trained": {"path": path}}
    return [make_confidence(name, 3, **options.get(name, {})) for name in BUILTIN_CONFIDENCES]


def test_every_source_keeps_the_protocol(tmp_path):
    sources = every_source(tmp_path)
    assert [source.name for source in sources] == ["estimator", "head", "raw", "threshold", "trained", "fixed"]
    for source in sources:
        assert isinstance(source, ConfidenceSource)
        drafts = signals()
        found = source.confidence(drafts)
        assert found.shape == (4, 3)
        assert found.dtype == torch.float32
        assert ((found >= 0) & (found <= 1)).all()
        source.observe(drafts, judged([3, 2, 1, 0], [3, 1, 0, 0]))
        assert source.confidence(signals(num_requests=0)).shape == (0, 3)


def test_confidence_of_a_slot_reads_that_slot_alone(tmp_path):
    """Changing the signals of positions from i on leaves the confidences before i as they are."""
    for source in every_source(tmp_path):
        one, two = signals(seed=1), signals(seed=2)
        for position in range(3):
            mixed = DraftSignals(
                features=torch.cat((one.features[:, :position], two.features[:, position:]), 1),
                num_drafted=one.num_drafted,
                q_max=torch.cat((one.q_max[:, :position], two.q_max[:, position:]), 1),
                head_logits=torch.cat((one.head_logits[:, :position], two.head_logits[:, position:]), 1),
            )
            assert torch.equal(source.confidence(mixed)[:, :position], source.confidence(one)[:, :position])


def test_simple_sources_say_what_they_are(tmp_path):
    drafts = signals()
    assert torch.equal(make_confidence("raw", 3).confidence(drafts), drafts.q_max)
    assert torch.equal(FixedConfidence().confidence(drafts), torch.ones(4, 3))
    cut = make_confidence("threshold", 3, threshold=0.5).confidence(drafts)
    assert torch.equal(cut, (drafts.q_max >= 0.5).float())
    lengths = (survival_probs(cut, drafts.num_drafted) > 0).sum(1)
    for row, length in zip(drafts.q_max.tolist(), lengths.tolist(), strict=True):
        assert all(q >= 0.5 for q in row[:length])
        assert length == 3 or row[length] < 0.5


def test_estimator_source_learns_from_outcomes():
    source = make_confidence("estimator", 3)
    drafts = signals()
    before = source.confidence(drafts)
    for _ in range(100):
        source.observe(drafts, judged([3] * 4, [3] * 4))
    assert (source.confidence(drafts) > before).all()


def test_trained_source_equals_scikit_learn_and_survives_a_file(tmp_path):
    rng = np.random.default_rng(0)
    features = rng.normal(1, 2, (3000, 2, 1)).astype(np.float32)
    accepted = rng.random((3000, 2)) < 1 / (1 + np.exp(-0.7 * features[..., 0] + 0.3))
    outcome = judged(np.full(3000, 2), accepted.cumprod(1).sum(1))
    source = TrainedConfidence.fit(torch.from_numpy(features), outcome)
    first = np.concatenate((features[:, 0], np.ones((3000, 1)), np.zeros((3000, 1))), axis=1)
    second = np.concatenate((features[:, 1], np.zeros((3000, 1)), np.ones((3000, 1))), axis=1)[accepted[:, 0]]
    reference = LogisticRegression(C=np.inf, fit_intercept=False, tol=1e-10, max_iter=1000)
    reference.fit(np.concatenate((first, second)), np.concatenate((accepted[:, 0], accepted[accepted[:, 0], 1])))
    coefficients = source.estimator.coefficients
    np.testing.assert_allclose(
        np.concatenate((coefficients.slopes, coefficients.intercepts)), reference.coef_[0], atol=1e-3
    )
    source.save(tmp_path / "trained.json")
    loaded = make_confidence("trained", 2, path=tmp_path / "trained.json")
    drafts = signals(num_positions=2)
    assert torch.equal(loaded.confidence(drafts), source.confidence(drafts))
    loaded.observe(drafts, judged([2] * 4, [0] * 4))
    assert torch.equal(loaded.confidence(drafts), source.confidence(drafts))
    with pytest.raises(EstimatorFileError, match="num_positions 2"):
        make_confidence("trained", 3, path=tmp_path / "trained.json")


def overconfident_drafts(num_drafts, seed, sharpness=(2.0, 1.0, 2.5)):
    """Head logits that overstate the log-odds by a factor per position."""
    rng = np.random.default_rng(seed)
    true = rng.normal(0.8, 1.2, (num_drafts, 3))
    accepted = (rng.random(true.shape) < 1 / (1 + np.exp(-true))).cumprod(1).sum(1)
    logits = torch.from_numpy(true * np.array(sharpness))
    shape = logits.shape
    drafts = DraftSignals(torch.zeros(*shape, 0), torch.full(shape[:1], 3), torch.zeros(shape), logits)
    return drafts, accepted


def product_error(source, drafts, accepted):
    survival = source.confidence(drafts).cumprod(1)
    return [calibration_error(survival[:, i].numpy(), accepted > i) for i in range(3)]


def test_head_temperatures_calibrate_the_product_from_left_to_right():
    drafts, accepted = overconfident_drafts(2048, seed=0)
    fresh, unseen = overconfident_drafts(20_000, seed=1)
    head = HeadConfidence(3)
    before = product_error(head, fresh, unseen)
    head.observe(drafts, judged(np.full(2048, 3), accepted))
    head.fit()
    after = product_error(head, fresh, unseen)
    np.testing.assert_allclose(head.temperatures, [2.0, 1.0, 2.5], rtol=0.45)
    assert max(after) < 0.025
    assert before[0] > 0.05
    assert before[2] > 0.05


def test_head_temperature_is_the_best_of_the_grid_by_the_plain_calibration_error():
    rng = np.random.default_rng(3)
    logits, before = rng.normal(0, 2, 500), rng.random(500)
    accepted, known = rng.random(500) < before / (1 + np.exp(-logits / 1.5)), rng.random(500) < 0.8
    found = fit_temperature(logits, accepted, known, before)
    errors = [calibration_error((before / (1 + np.exp(-logits / t)))[known], accepted[known]) for t in TEMPERATURE_GRID]
    assert found == TEMPERATURE_GRID[int(np.argmin(errors))]
    assert fit_temperature(logits, accepted, np.zeros(500, dtype=bool), before) == 1.0


def test_head_calibrates_itself_while_serving_and_ignores_what_does_not_teach():
    head, deaf = HeadConfidence(3, refit_interval=30), HeadConfidence(3, refit_interval=30)
    for step in range(200):
        drafts, accepted = overconfident_drafts(16, seed=step)
        head.observe(drafts, judged(np.full(16, 3), accepted))
        deaf.observe(drafts, judged(np.full(16, 3), accepted, teaches=False))
    assert max(product_error(head, *overconfident_drafts(20_000, seed=999))) < 0.035
    np.testing.assert_array_equal(deaf.temperatures, np.ones(3))


def test_head_does_not_take_a_trimmed_slot_for_a_rejected_one():
    drafts, accepted = overconfident_drafts(2048, seed=0, sharpness=(1.0, 1.0, 1.0))
    lengths = np.random.default_rng(5).integers(1, 4, 2048)
    head = HeadConfidence(3)
    head.observe(drafts, judged(lengths, np.minimum(lengths, accepted)))
    head.fit()
    np.testing.assert_allclose(head.temperatures, 1.0, rtol=0.35)


@settings(max_examples=200, deadline=None)
@given(
    arrays(np.float32, (3, 8), elements=st.floats(-0.5, 1.5, width=32) | st.just(np.nan)),
    st.lists(st.integers(0, 8), min_size=3, max_size=3),
)
def test_survival_never_rises_and_is_zero_past_the_draft(confidences, drafted):
    found = survival_probs(torch.from_numpy(confidences), torch.tensor(drafted))
    assert ((found >= 0) & (found <= 1)).all()
    assert (found[:, 1:] <= found[:, :-1]).all()
    for row, length in enumerate(drafted):
        assert (found[row, length:] == 0).all()
        expected = np.cumprod(np.clip(np.nan_to_num(confidences[row, :length].astype(np.float64)), 0, 1))
        np.testing.assert_allclose(found[row, :length].numpy(), expected, rtol=1e-5, atol=1e-37)


def test_survival_of_an_empty_batch_and_of_no_positions():
    assert survival_probs(torch.empty(0, 4), torch.empty(0, dtype=torch.int64)).shape == (0, 4)
    assert survival_probs(torch.empty(2, 0), torch.zeros(2, dtype=torch.int64)).shape == (2, 0)
    with pytest.raises(ValueError, match=r"\[R, K\]"):
        survival_probs(torch.ones(2, 3), torch.ones(3, dtype=torch.int64))


class Registered:
    name = "registered"
    feature_names = ()

    def __init__(self, num_positions, scale=1.0):
        self.scale = scale

    def confidence(self, signals):
        return signals.q_max * self.scale

    def observe(self, signals, outcome):
        pass


def test_third_parties_register_an_entry_point(monkeypatch):
    name = f"{__name__}:Registered"
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])
    points = [EntryPoint("registered", name, "trimtab.confidences"), EntryPoint("broken", "math:sqrt", "")]
    monkeypatch.setattr(module, "entry_points", lambda group: points)
    assert make_confidence("registered", 3, scale=0.5).scale == 0.5
    assert "registered" in confidence_names()
    with pytest.raises(TypeError, match="lacks name"):
        make_confidence("broken", 3)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: make_confidence("estimater", 3), ValueError, 'did you mean "estimator"'),
        (lambda: make_confidence("zzz", 3), ValueError, "known: estimator, head"),
        (lambda: make_confidence("raw", 3, threshold=0.5), TypeError, "threshold"),
        (lambda: make_confidence("threshold", 3, threshold=2.0), ValueError, "got 2.0"),
        (lambda: make_confidence("head", 3, temperatures=[1.0, 1.0]), ValueError, "3 positive temperatures"),
        (lambda: make_confidence("head", 2, temperatures=[1.0, 0.0]), ValueError, "2 positive temperatures"),
        (lambda: make_confidence("estimator", 0), ValueError, "num_positions"),
        (lambda: make_confidence("estimator", 3, feature_names=("log_q_sampled",)), LossyFeatureError, "log_q_sampled"),
        (lambda: HeadConfidence(3).confidence(signals(head=False)), ValueError, "no confidence head"),
        (lambda: HeadConfidence(2).confidence(signals()), ValueError, "K = 3, not 2"),
        (lambda: DraftSignals(torch.zeros(2, 3, 1), torch.zeros(2), torch.zeros(2, 4)), ValueError, r"q_max \[R, K\]"),
    ],
)
def test_bad_input_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_the_example_of_the_howto_works():
    page = Path(__file__).parents[2] / "docs" / "howto" / "confidence.md"
    (example,) = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    names = {}
    exec(example, names)
    source = names["PositionRate"](3)
    assert isinstance(source, ConfidenceSource)
    source.observe(signals(num_requests=2), judged([3, 2], [1, 2]))
    assert source.confidence(signals()).shape == (4, 3)
    assert source.judged.tolist() == [12.0, 12.0, 10.0]


def test_every_public_name_exists():
    for name in trimtab.policy.__all__:
        assert getattr(trimtab.policy, name) is not None
