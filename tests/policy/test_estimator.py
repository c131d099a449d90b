"""The online acceptance estimator: the published arithmetic, what it learns, and what can not mislead it."""

import doctest
import json
import math

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from trimtab.policy import estimator as estimator_module
from trimtab.policy import irls
from trimtab.policy.estimator import (
    AcceptanceEstimator,
    EstimatorFileError,
    Exploration,
    VerificationOutcome,
    request_key,
)
from trimtab.policy.features import LossyFeatureError
from trimtab.policy.irls import Coefficients


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


class Traffic:
    """Drafts whose acceptance follows a known logistic law, cut at the first rejection and at an admitted length."""

    def __init__(self, slopes, intercepts, seed=0, centre=1.0, spread=2.0):
        self.slopes, self.intercepts = np.atleast_1d(slopes).astype(float), np.asarray(intercepts, dtype=float)
        self.rng, self.centre, self.spread = np.random.default_rng(seed), centre, spread

    def step(self, num_requests, lengths=None, teaches=True, contributors=None):
        num_positions = len(self.intercepts)
        shape = (num_requests, num_positions, len(self.slopes))
        features = (self.centre + self.spread * self.rng.standard_normal(shape)).astype(np.float32)
        accepted = self.rng.random(shape[:2]) < sigmoid(features @ self.slopes + self.intercepts)
        survived = accepted.cumprod(1)
        if lengths is None:
            lengths = self.rng.integers(0, num_positions + 1, num_requests)
        num_accepted = np.minimum(survived.sum(1), lengths)
        return torch.from_numpy(features), outcome(lengths, num_accepted, teaches, contributors)


def outcome(verified, accepted, teaches=True, contributors=None):
    verified = torch.as_tensor(verified)
    return VerificationOutcome(
        num_verified=verified,
        num_accepted=torch.as_tensor(accepted),
        teaches=torch.full(verified.shape, teaches) if isinstance(teaches, bool) else torch.as_tensor(teaches),
        contributors=contributors,
    )


def run(estimator, traffic, num_steps, num_requests=32, **options):
    for _ in range(num_steps):
        estimator.observe(*traffic.step(num_requests, **options))
    return estimator


def observed_slots(features, result):
    """Plain loop over the labels: (feature vector, position, accepted)."""
    slots = []
    for row in range(features.shape[0]):
        verified, accepted = int(result.num_verified[row]), int(result.num_accepted[row])
        for position in range(min(verified, accepted + 1)):
            slots.append((features[row, position].numpy().astype(np.float64), position, float(position < accepted)))
    return slots


def dense_newton_round(slots, slopes, intercepts):
    """One published round with the dense Hessian: an independent implementation, no Schur complement."""
    p, k = len(slopes), len(intercepts)
    hessian, gradient, counts = np.zeros((p + k, p + k)), np.zeros(p + k), np.zeros(k)
    for feature, position, label in slots:
        design = np.concatenate((feature, np.eye(k)[position]))
        c = sigmoid(design @ np.concatenate((slopes, intercepts)))
        hessian += c * (1 - c) * np.outer(design, design)
        gradient += (label - c) * design
        counts[position] += 1
    step = np.linalg.solve(hessian + 1e-3 * np.eye(p + k), gradient)
    n = counts.sum()
    new_slopes = slopes + step[:p] * n / (n + 50)
    if new_slopes[0] < 0 or not np.isfinite(step).all():
        return slopes, intercepts
    return new_slopes, intercepts + step[p:] * counts / (counts + 50)


@pytest.mark.parametrize(
    ("names", "options"),
    [(("logit_q_max",), {}), (("logit_q_max", "entropy", "request_acceptance"), {"max_move": 1.0})],
)
def test_refits_equal_the_published_newton_rounds(names, options):
    p = len(names)
    traffic = Traffic([0.55, -0.2, 0.3][:p], [0.4, 0.1, -0.1, -0.2], seed=3)
    estimator = AcceptanceEstimator(4, names, refit_interval=20, **options)
    slopes, intercepts, slots = np.array([0.5, 0, 0][:p]), np.full(4, -0.2), []
    for step in range(120):
        features, result = traffic.step(6)
        slots += observed_slots(features, result)
        estimator.observe(features, result)
        if (step + 1) % 20 == 0:
            slopes, intercepts = dense_newton_round(slots, slopes, intercepts)
            slots = []
            np.testing.assert_allclose(estimator.coefficients.slopes, slopes, atol=1e-10)
            np.testing.assert_allclose(estimator.coefficients.intercepts, intercepts, atol=1e-10)
    assert estimator.num_refits == 6
    assert estimator.num_refused == 0
    features, _ = traffic.step(5)
    expected = sigmoid(features.double().numpy() @ slopes + intercepts)
    np.testing.assert_allclose(estimator.predict(features).numpy(), expected, atol=1e-6)


def test_the_example_of_the_module_runs():
    result = doctest.testmod(estimator_module)
    assert result.attempted > 3
    assert result.failed == 0


def test_start_values_are_the_published_ones():
    estimator = AcceptanceEstimator(3)
    features = torch.tensor([[[0.0], [2.0], [-4.0]]])
    expected = sigmoid(np.array([-0.2, 0.8, -2.2]))
    np.testing.assert_allclose(estimator.predict(features)[0].numpy(), expected, atol=1e-6)


@pytest.mark.parametrize("trimmed", [False, True])
def test_coefficients_are_recovered_under_censoring(trimmed):
    intercepts = [0.6, 0.3, 0.1, -0.1, -0.3]
    traffic = Traffic([0.8], intercepts, seed=1)
    lengths = None if trimmed else np.full(256, 5)
    estimator = run(AcceptanceEstimator(5), traffic, 1000, num_requests=256, lengths=lengths)
    np.testing.assert_allclose(estimator.coefficients.slopes, [0.8], atol=0.05)
    np.testing.assert_allclose(estimator.coefficients.intercepts, intercepts, atol=0.12)


def test_admission_by_the_estimate_itself_does_not_bias_it():
    intercepts = np.array([0.6, 0.3, 0.1, -0.1])
    traffic = Traffic([0.8], intercepts, seed=2)
    estimator = AcceptanceEstimator(4)
    for _ in range(1200):
        features, full = traffic.step(128, lengths=np.full(128, 4))
        survival = estimator.predict(features).cumprod(1)
        lengths = (survival > 0.3).sum(1)
        estimator.observe(features, outcome(lengths, torch.minimum(lengths, full.num_accepted)))
    np.testing.assert_allclose(estimator.coefficients.slopes, [0.8], atol=0.06)
    np.testing.assert_allclose(estimator.coefficients.intercepts, intercepts, atol=0.2)


def test_agrees_with_scikit_learn_on_the_same_labels():
    features, result = Traffic([0.7, -0.4], [0.5, 0.2, -0.2], seed=5).step(1500)
    estimator = AcceptanceEstimator(3, ("logit_q_max", "entropy"), refit_interval=1)
    for _ in range(60):
        estimator.observe(features, result)
    slots = observed_slots(features, result)
    design = np.array([np.concatenate((feature, np.eye(3)[position])) for feature, position, _ in slots])
    reference = LogisticRegression(C=np.inf, fit_intercept=False, tol=1e-10, max_iter=1000)
    reference.fit(design, [label for *_, label in slots])
    found = np.concatenate((estimator.coefficients.slopes, estimator.coefficients.intercepts))
    np.testing.assert_allclose(found, reference.coef_[0], atol=1e-3)


def test_a_drifting_workload_is_followed():
    estimator = run(AcceptanceEstimator(4), Traffic([0.5], [0.6, 0.5, 0.4, 0.3], seed=1), 600)
    probe = torch.full((1, 4, 1), 1.0)
    before = estimator.predict(probe)[0]
    run(estimator, Traffic([0.5], [-0.8, -0.9, -1.0, -1.1], seed=2), 300)
    after = estimator.predict(probe)[0].numpy()
    np.testing.assert_allclose(before.numpy(), sigmoid(np.array([1.1, 1.0, 0.9, 0.8])), atol=0.06)
    np.testing.assert_allclose(after, sigmoid(np.array([-0.3, -0.4, -0.5, -0.6])), atol=0.08)


def poisoned(limit, poison):
    """48 honest requests and one whose certain-looking drafts are always rejected; returns their predictions."""
    estimator = AcceptanceEstimator(4, contributor_limit=limit)
    traffic = Traffic([0.5], [0.4, 0.2, 0.0, -0.1], seed=7)
    keys = torch.arange(49)
    for step in range(2000):
        features, honest = traffic.step(49, lengths=np.full(49, 4))
        verified, accepted = honest.num_verified, honest.num_accepted.clone()
        if poison and step >= 500:
            features[0], accepted[0] = 40.0, 0
        estimator.observe(features, outcome(verified, accepted, contributors=keys))
    grid = torch.linspace(-4, 8, 25)[:, None, None].expand(25, 4, 1)
    return estimator.predict(grid)


def test_one_poisoned_user_among_many_does_not_move_the_others():
    clean, attacked, unprotected = poisoned(3.0, False), poisoned(3.0, True), poisoned(1e9, True)
    assert (attacked - clean).abs().max() < 0.03
    assert (unprotected - clean).abs().max() > 0.15


def test_no_bucket_pulls_harder_than_the_limit_times_the_median():
    rng = np.random.default_rng(0)
    features = rng.normal(1, 2, (32, 4, 1))
    features[0] = 40.0
    coefficients = Coefficients(np.array([0.5]), np.full(4, -0.2))
    probs = irls.predict_probs(features, coefficients)
    labels = rng.random((32, 4)) < probs
    labels[0] = False
    rows = 100 * irls.contributions(features, probs, labels, np.ones((32, 4), dtype=bool))
    weights = irls.contributor_weights(rows, 4, 1, limit=3.0)
    sums = irls.RoundSums.unflatten(rows.sum(0), 4, 1)
    hessian = np.block(
        [[sums.slope_hessian, sums.cross_hessian.T], [sums.cross_hessian, np.diag(sums.intercept_hessian)]]
    ) + 1e-3 * np.eye(5)
    gradients = np.array(
        [
            np.concatenate((one.slope_gradient, one.intercept_gradient))
            for one in (irls.RoundSums.unflatten(row, 4, 1) for row in rows)
        ]
    )
    pulls = np.sqrt(np.einsum("bi,ij,bj->b", gradients, np.linalg.inv(hessian), gradients))
    assert pulls[0] > 10 * np.median(pulls)
    assert (weights * pulls).max() <= 3 * np.median(pulls) * (1 + 1e-9)
    assert weights[0] < 0.3
    assert (weights[1:] > 0.3).all()


def test_few_contributors_are_not_limited_and_many_equal_ones_lose_nothing():
    traffic, estimators = Traffic([0.7], [0.3, 0.1], seed=4), [AcceptanceEstimator(2) for _ in range(2)]
    for _ in range(100):
        features, result = traffic.step(4)
        estimators[0].observe(features, result)
        keyed = outcome(result.num_verified, result.num_accepted, contributors=torch.arange(4))
        estimators[1].observe(features, keyed)
    np.testing.assert_allclose(estimators[0].coefficients.slopes, estimators[1].coefficients.slopes, atol=1e-12)


def test_requests_that_do_not_teach_leave_no_trace():
    quiet, loud = AcceptanceEstimator(3), AcceptanceEstimator(3)
    traffic, odd = Traffic([0.5], [0.2, 0.1, 0.0], seed=6), Traffic([0.5], [-5.0, -5.0, -5.0], seed=8)
    for _ in range(100):
        features, result = traffic.step(8)
        others, refused = odd.step(4)
        quiet.observe(features, result)
        both = outcome(
            torch.cat((result.num_verified, refused.num_verified)),
            torch.cat((result.num_accepted, refused.num_accepted)),
            teaches=[True] * 8 + [False] * 4,
        )
        loud.observe(torch.cat((features, others)), both)
    np.testing.assert_allclose(loud.coefficients.slopes, quiet.coefficients.slopes, atol=1e-12)
    np.testing.assert_allclose(loud.coefficients.intercepts, quiet.coefficients.intercepts, atol=1e-12)


def test_an_outcome_must_say_whether_requests_teach():
    with pytest.raises(TypeError, match="teaches"):
        VerificationOutcome(num_verified=torch.tensor([1]), num_accepted=torch.tensor([1]))


def test_exploration_keeps_deep_positions_learning():
    """Trimmed at a survival of 0.7, a workload that turns easy is noticed at depth only if some drafts go untrimmed."""

    def final_error(share):
        estimator, exploration = AcceptanceEstimator(4), Exploration(share, seed=1)
        hard = Traffic([0.5], [1.5, -4, -4, -4], seed=1, spread=1.0)
        easy = Traffic([0.5], [1.5, 2, 2, 2], seed=2, spread=1.0)
        keys = torch.arange(32)
        for step in range(1600):
            features, full = (hard if step < 600 else easy).step(32, lengths=np.full(32, 4))
            lengths = (estimator.predict(features).cumprod(1) > 0.7).sum(1)
            lengths[exploration.untrimmed(keys, torch.full((32,), step))] = 4
            estimator.observe(features, outcome(lengths, torch.minimum(lengths, full.num_accepted)))
        probe = torch.full((1, 4, 1), 1.0)
        return float((estimator.predict(probe)[0, 1:] - sigmoid(2.5)).abs().max())

    off, on = final_error(0.0), final_error(0.05)
    assert off > 0.3
    assert on < 0.1


def test_exploration_takes_its_share_and_depends_on_key_and_counter_only():
    keys = torch.tensor([request_key(f"request-{i}") for i in range(20_000)])
    zeros = torch.zeros_like(keys)
    chosen = Exploration(0.1, seed=3).untrimmed(keys, zeros)
    assert chosen.float().mean() == pytest.approx(0.1, abs=0.01)
    assert torch.equal(chosen, Exploration(0.1, seed=3).untrimmed(keys, zeros))
    for other in (Exploration(0.1, seed=4).untrimmed(keys, zeros), Exploration(0.1, seed=3).untrimmed(keys, zeros + 1)):
        assert (chosen & other).float().mean() == pytest.approx(0.01, abs=0.005)
    assert not Exploration(0.0).untrimmed(keys, zeros).any()
    assert Exploration(1.0).untrimmed(keys, zeros).all()


def test_features_that_are_not_finite_never_reach_the_sums():
    clean, dirty = AcceptanceEstimator(3), AcceptanceEstimator(3)
    features, result = Traffic([0.5], [0.2, 0.1, 0.0], seed=6).step(8, lengths=np.full(8, 3))
    clean.observe(features, result)
    bad = torch.tensor([math.nan, math.inf, -math.inf])[:, None, None].expand(3, 3, 1)
    rows = outcome(
        torch.cat((result.num_verified, torch.full((3,), 3))),
        torch.cat((result.num_accepted, torch.ones(3, dtype=torch.int64))),
    )
    dirty.observe(torch.cat((features, bad)), rows)
    np.testing.assert_allclose(dirty.accumulators.buckets, clean.accumulators.buckets, atol=1e-12)
    assert dirty.num_dropped_slots == 6
    assert dirty.predict(bad).isfinite().all()


@pytest.mark.parametrize("acceptance", [0.05, 0.3, 0.9])
def test_one_hot_drafts_do_not_swing_and_are_learned(acceptance):
    rng = np.random.default_rng(0)
    estimator = AcceptanceEstimator(3)
    features, previous = torch.full((16, 3, 1), 40.0), 1.0
    for step in range(2000):
        num_accepted = (rng.random((16, 3)) < acceptance).cumprod(1).sum(1)
        estimator.observe(features, outcome(np.full(16, 3), num_accepted))
        now = float(estimator.predict(features)[0, 0])
        assert abs(now - previous) <= 0.2501 or step == 0
        previous = now
    np.testing.assert_allclose(estimator.predict(features)[0, :1].numpy(), acceptance, atol=0.05)


def test_no_refit_moves_any_prediction_further_than_the_cap():
    rng = np.random.default_rng(1)
    estimator = AcceptanceEstimator(4, refit_interval=5, max_move=0.1)
    grid = torch.linspace(-40, 40, 2001)[:, None, None].expand(2001, 4, 1)
    largest = 0.0
    for _ in range(100):
        before = estimator.predict(grid)
        flip = rng.random() < 0.5
        for _ in range(5):
            features = torch.from_numpy(rng.choice([-40.0, -3.0, 0.5, 40.0], (16, 4, 1)).astype(np.float32))
            estimator.observe(features, outcome(np.full(16, 4), np.full(16, 4 * int(flip))))
        largest = max(largest, float((estimator.predict(grid) - before).abs().max()))
    assert 0.05 < largest < 0.115  # 0.1 at the probes, every 0.25 log-odds


def test_a_refit_without_observations_changes_nothing():
    estimator = AcceptanceEstimator(3)
    before = estimator.coefficients
    for _ in range(200):
        estimator.observe(torch.zeros(2, 3, 1), outcome([0, 0], [0, 0]))
        estimator.observe(torch.zeros(0, 3, 1), outcome(np.zeros(0, int), np.zeros(0, int)))
    assert estimator.num_refits == 4
    np.testing.assert_array_equal(estimator.coefficients.slopes, before.slopes)
    np.testing.assert_array_equal(estimator.coefficients.intercepts, before.intercepts)
    assert estimator.last_round is None


def test_replicas_add_up_to_one_fit():
    whole, one, two = (AcceptanceEstimator(3, refit_interval=10_000) for _ in range(3))
    traffic = Traffic([0.6], [0.4, 0.1, -0.2], seed=9)
    for step in range(60):
        features, result = traffic.step(8)
        whole.observe(features, result)
        (one if step % 3 else two).observe(features, result)
    one.merge(two)
    for estimator in (whole, one):
        estimator.refit()
    np.testing.assert_allclose(one.coefficients.slopes, whole.coefficients.slopes, atol=1e-12)
    np.testing.assert_allclose(one.coefficients.intercepts, whole.coefficients.intercepts, atol=1e-12)
    with pytest.raises(ValueError, match="set_coefficients"):
        one.merge(two)
    two.set_coefficients(one.coefficients)
    one.merge(two.accumulators)


def test_memory_depends_on_neither_rounds_nor_batch():
    def size(num_steps, num_requests):
        estimator = AcceptanceEstimator(4, ("logit_q_max", "entropy"))
        run(estimator, Traffic([0.5, 0.1], [0.0] * 4), num_steps, num_requests)
        arrays = (estimator._buckets, estimator._probes, estimator._quality._sums)
        return [array.nbytes for array in arrays], sorted(vars(estimator))

    assert size(150, 8) == size(350, 64)


def test_progressive_quality_of_a_round_is_scored_before_learning():
    estimator = run(AcceptanceEstimator(3), Traffic([0.5], [-0.2] * 3, seed=2), 100)
    first = estimator.last_round
    assert first is not None
    assert first.calibration_error < 0.03
    assert 0.5 < first.auc < 1
    run(estimator, Traffic([0.5], [2.0] * 3, seed=3), 100)
    assert estimator.last_round.calibration_error > 0.2


def test_recent_bins_hold_each_round_and_forget_the_older():
    estimator = run(AcceptanceEstimator(3), Traffic([0.5], [-0.2] * 3, seed=2), 100)
    first, num_first = estimator.recent_bins, estimator.last_round.count
    assert first.shape == (3, 10)
    assert first[2].sum() == num_first
    assert first[0].sum() / num_first == pytest.approx(estimator.last_round.mean_predicted)
    assert first[1].sum() / num_first == pytest.approx(estimator.last_round.mean_observed)
    run(estimator, Traffic([0.5], [-0.2] * 3, seed=3), 100)
    assert estimator.recent_bins[2].sum() == pytest.approx(0.9 * num_first + estimator.last_round.count)


def test_state_survives_a_restart(tmp_path):
    estimator = run(AcceptanceEstimator(3), Traffic([0.8], [0.5, 0.2, 0.0]), 250)
    path = tmp_path / "state" / "estimator.json"
    estimator.save(path)
    restored = AcceptanceEstimator(3)
    restored.load(path)
    np.testing.assert_array_equal(restored.coefficients.slopes, estimator.coefficients.slopes)
    np.testing.assert_array_equal(restored.coefficients.intercepts, estimator.coefficients.intercepts)
    assert (restored.num_refits, restored.num_labels) == (estimator.num_refits, estimator.num_labels)
    assert [file.name for file in path.parent.iterdir()] == ["estimator.json"]


def test_a_failed_save_keeps_the_old_file(tmp_path, monkeypatch):
    estimator = AcceptanceEstimator(3)
    path = tmp_path / "estimator.json"
    estimator.save(path)
    before = path.read_text()
    monkeypatch.setattr(estimator, "state", lambda: {"slopes": object()})
    with pytest.raises(TypeError):
        estimator.save(path)
    assert path.read_text() == before
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_positions": 4}, "num_positions 4, this estimator 3"),
        ({"feature_names": ["entropy"]}, "feature_names"),
        ({"version": 99}, "version 99"),
        ({"format": "something"}, "format 'something'"),
        ({"slopes": [math.nan]}, "no usable coefficients"),
        ({"intercepts": [0.0]}, "no usable coefficients"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_and_changes_nothing(tmp_path, change, message):
    estimator = AcceptanceEstimator(3)
    path = tmp_path / "estimator.json"
    path.write_text(json.dumps(estimator.state() | change))
    before = estimator.coefficients
    with pytest.raises(EstimatorFileError, match=message):
        estimator.load(path)
    assert estimator.coefficients is before


@pytest.mark.parametrize("content", ["", "[]", "{}", "\x00\x01", '{"format": 1}'])
def test_a_file_that_is_no_estimator_is_refused(tmp_path, content):
    path = tmp_path / "estimator.json"
    path.write_text(content)
    with pytest.raises(EstimatorFileError, match="not a saved estimator"):
        AcceptanceEstimator(3).load(path)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: AcceptanceEstimator(0), "num_positions"),
        (lambda: AcceptanceEstimator(3, ()), "not empty"),
        (lambda: AcceptanceEstimator(3, ("entropy", "entropy")), "distinct"),
        (lambda: AcceptanceEstimator(3, refit_interval=0), "refit_interval"),
        (lambda: AcceptanceEstimator(3, max_move=0.0), "max_move"),
        (lambda: AcceptanceEstimator(3).predict(torch.zeros(2, 4, 1)), r"\[R, 3, 1\], got \[2, 4, 1\]"),
        (lambda: AcceptanceEstimator(3).predict(torch.zeros(2, 3)), r"\[R, 3, 1\]"),
        (lambda: AcceptanceEstimator(3).observe(torch.zeros(2, 3, 1), outcome([1], [1])), "2 rows of features but 1"),
        (lambda: AcceptanceEstimator(3).merge(AcceptanceEstimator(3, ("entropy",))), "entropy"),
        (lambda: outcome([1], [2]), "num_accepted <= num_verified"),
        (lambda: outcome([1], [-1]), "0 <= num_accepted"),
        (lambda: outcome([1, 2], [1]), r"must all be \[R\]"),
        (lambda: outcome([1.0], [1.0]), "integers"),
        (lambda: outcome([1], [1], teaches=[1]), "bool"),
        (lambda: Exploration(1.5), r"\[0, 1\], got 1.5"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_lossy_features_are_refused():
    with pytest.raises(LossyFeatureError, match="logit_q_sampled"):
        AcceptanceEstimator(3, ("logit_q_sampled",))
