"""Quality measures equal scikit-learn's, on arrays and as streams."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.calibration import calibration_curve
from sklearn.metrics import log_loss as sklearn_log_loss
from sklearn.metrics import roc_auc_score

from trimtab.policy.quality import StreamingQuality, auc, calibration_error, log_loss, reliability_curve


def sample(size, seed, cells=None):
    """Labelled probabilities, tied when ``cells`` is given (then cell centres, off every bin edge)."""
    rng = np.random.default_rng(seed)
    probs = rng.beta(2, 1, size) if cells is None else (rng.integers(0, cells, size) + 0.5) / cells
    return probs, rng.random(size) < probs**1.3


SAMPLES = [sample(2000, 0), sample(3000, 1, cells=7), sample(400, 2, cells=1000), sample(50, 3)]


@pytest.mark.parametrize(("probs", "labels"), SAMPLES)
def test_auc_and_log_loss_equal_scikit_learn(probs, labels):
    assert auc(probs, labels) == pytest.approx(roc_auc_score(labels, probs), abs=1e-12)
    assert log_loss(probs, labels) == pytest.approx(sklearn_log_loss(labels, probs), abs=1e-12)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.9, 1.0]), st.booleans()), min_size=2, max_size=40))
def test_measures_equal_scikit_learn_on_tied_values_and_certainties(pairs):
    probs, labels = np.array([p for p, _ in pairs]), np.array([y for _, y in pairs])
    if labels.any() and not labels.all():
        assert auc(probs, labels) == pytest.approx(roc_auc_score(labels, probs), abs=1e-12)
    expected = sklearn_log_loss(labels, probs, labels=[False, True])
    assert log_loss(probs, labels) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(("probs", "labels"), SAMPLES)
@pytest.mark.parametrize("strategy", ["uniform", "quantile"])
@pytest.mark.parametrize("num_bins", [1, 10, 15])
def test_reliability_curve_equals_scikit_learn(probs, labels, strategy, num_bins):
    curve = reliability_curve(probs, labels, num_bins, strategy)
    observed, predicted = calibration_curve(labels, probs, n_bins=num_bins, strategy=strategy)
    np.testing.assert_allclose(curve.observed, observed, atol=1e-12)
    np.testing.assert_allclose(curve.mean_predicted, predicted, atol=1e-12)
    expected = np.sum(np.abs(observed - predicted) * curve.counts) / len(probs)
    assert curve.counts.sum() == len(probs)
    assert calibration_error(probs, labels, num_bins, strategy) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("probs", "labels"), SAMPLES)
def test_stream_equals_the_whole_array(probs, labels):
    parts = [StreamingQuality(), StreamingQuality()]
    for index, (some, marks) in enumerate(zip(np.array_split(probs, 9), np.array_split(labels, 9), strict=True)):
        parts[index % 2].update(some, marks)
    parts[0].merge(parts[1])
    found = parts[0].summary()
    assert found.count == len(probs)
    assert found.log_loss == pytest.approx(log_loss(probs, labels), abs=1e-12)
    assert found.calibration_error == pytest.approx(calibration_error(probs, labels), abs=1e-12)
    assert found.mean_predicted == pytest.approx(probs.mean())
    assert found.mean_observed == pytest.approx(labels.mean())
    tied = len(np.unique(probs)) < len(np.unique(np.ceil(probs * 1000)))  # never: cells can only join values
    assert not tied
    assert found.auc == pytest.approx(auc(probs, labels), abs=1e-3)


def test_streamed_auc_is_exact_when_every_value_has_a_cell_of_its_own():
    probs, labels = sample(3000, 4, cells=100)
    stream = StreamingQuality()
    stream.update(probs, labels)
    assert stream.summary().auc == pytest.approx(roc_auc_score(labels, probs), abs=1e-12)


def test_streamed_equal_mass_bins_hold_equal_mass():
    probs, labels = sample(5000, 5)
    stream = StreamingQuality()
    stream.update(probs, labels)
    curve = stream.curve(10, "quantile")
    assert np.abs(curve.counts - 500).max() < 30
    assert curve.calibration_error == pytest.approx(calibration_error(probs, labels, 10, "quantile"), abs=2e-3)


def test_stream_memory_does_not_grow():
    stream = StreamingQuality()
    before = stream._sums.nbytes
    for seed in range(20):
        stream.update(*sample(1000, seed))
    assert stream._sums.nbytes == before
    assert stream._num_pending < 2048
    assert stream.count == 20_000


def test_one_kind_of_label_has_no_auc_but_a_loss():
    stream = StreamingQuality()
    stream.update([0.9, 0.8], [1, 1])
    assert np.isnan(stream.summary().auc)
    with pytest.raises(ValueError, match="both accepted and rejected"):
        auc([0.9, 0.8], [1, 1])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: log_loss([], []), "no labels"),
        (lambda: StreamingQuality().summary(), "no labels"),
        (lambda: log_loss([0.5, 0.5], [1]), "2 probabilities but 1 labels"),
        (lambda: log_loss([1.5], [1]), r"\[0, 1\]"),
        (lambda: log_loss([np.nan], [1]), r"\[0, 1\]"),
        (lambda: StreamingQuality().update([-0.1], [1]), r"\[0, 1\]"),
        (lambda: StreamingQuality().update([0.1], [1, 0]), "1 probabilities but 2 labels"),
        (lambda: auc([0.1, np.nan], [1, 0]), "NaN"),
        (lambda: auc([0.1, 0.2], [2, 0]), "0 or 1"),
        (lambda: reliability_curve([0.1], [1], 0), "num_bins"),
        (lambda: StreamingQuality(100).merge(StreamingQuality(10)), "resolution"),
        (lambda: StreamingQuality(100).curve(7), "divide"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
