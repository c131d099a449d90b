"""What the additions to the published estimator buy, on simulated traffic with a known acceptance law.

Poison: one request among 49 sends extreme drafts; how far do predictions on ordinary features move, with and without
the contributor limit? Carry: excess log-loss over the true law when the Hessian of earlier rounds is carried over with
a decay, in a steady workload and after a jump (0 is what the estimator does). Exploration: error at deep positions
after a hard workload has turned easy, with a share of requests verified untrimmed.

Run: python benchmarks/estimator_robustness.py  (about two minutes on one core)
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from provenance import write_result
from torch import Tensor

from trimtab.policy import AcceptanceEstimator, Exploration, VerificationOutcome, irls

Array = NDArray[np.float64]
ATTACKS = {  # feature value, accepted slots of 4
    "looks certain, rejected": (40.0, 0),
    "looks hopeless, accepted": (-10.0, 4),
    "log-odds 0, accepted": (0.0, 4),
    "log-odds 3, rejected": (3.0, 0),
}


def draw(
    rng: Generator, slope: float, intercepts: Array, num_requests: int, spread: float = 2.0
) -> tuple[Tensor, Tensor, Array]:
    """One step of traffic: features [R, K, 1], accepted slots of fully verified drafts [R], true confidences [R, K]."""
    features = rng.normal(1.0, spread, (num_requests, len(intercepts))).astype(np.float32)
    truth = 1 / (1 + np.exp(-(slope * features + intercepts)))
    accepted = (rng.random(truth.shape) < truth).cumprod(1).sum(1)
    return torch.from_numpy(features)[..., None], torch.from_numpy(accepted), truth


def outcome(verified: Tensor, accepted: Tensor, contributors: Tensor | None = None) -> VerificationOutcome:
    """An outcome of requests that all teach."""
    return VerificationOutcome(verified, accepted, torch.ones(verified.shape, dtype=torch.bool), contributors)


def poisoned_predictions(limit: float, attack: tuple[float, int] | None, num_steps: int = 1500) -> Tensor:
    """Predictions on ordinary features after an attack (none if ``attack`` is None)."""
    rng, keys = np.random.default_rng(7), torch.arange(49)
    estimator = AcceptanceEstimator(4, contributor_limit=limit)
    for step in range(num_steps):
        features, accepted, _ = draw(rng, 0.5, np.array([0.4, 0.2, 0.0, -0.1]), 49)
        if attack is not None and step >= 300:
            features[0], accepted[0] = attack
        estimator.observe(features, outcome(torch.full((49,), 4), accepted, keys))
    return estimator.predict(torch.linspace(-4, 8, 25)[:, None, None].expand(25, 4, 1))


class CarryingEstimator(AcceptanceEstimator):
    """Keeps a decayed Hessian over rounds as a prior around the current coefficients."""

    decay = 0.0
    carried: Array | float = 0.0

    def refit(self) -> None:
        """As the parent, with the carried sums added."""
        shape = (self.num_positions, len(self.feature_names))
        flat = self._buckets.sum(0) + self.carried
        self._clear_round()
        if not self._take(irls.newton_step(irls.RoundSums.unflatten(flat, *shape))):
            self.num_refused += 1
        self.carried = self.decay * flat
        end = len(flat) - shape[0]
        self.carried[end - sum(shape) : end] = 0.0


def excess_loss(decay: float, num_requests: int, jump: bool, seed: int, num_steps: int = 2000) -> float:
    """Mean excess log-loss per observed slot over the true law, each slot scored before it was learned."""
    rng, estimator = np.random.default_rng(seed), CarryingEstimator(7)
    estimator.decay = decay
    intercepts, total, count = np.array([0.6, 0.4, 0.3, 0.2, 0.1, 0.0, -0.1]), 0.0, 0
    for step in range(num_steps):
        jumped = jump and step >= num_steps // 2
        features, accepted, truth = draw(rng, 0.55, intercepts - 1.2 * jumped, num_requests)
        result = outcome(torch.full((num_requests,), 7), accepted)
        if step >= (num_steps // 2 if jump else 300):
            found = estimator.predict(features).double().numpy()
            loss = truth * np.log(truth / found) + (1 - truth) * np.log((1 - truth) / (1 - found))
            _, observed = result.labels_to_host(7)
            total, count = total + loss[observed].sum(), count + observed.sum()
        estimator.observe(features, result)
    return float(total / count)


def deep_error(share: float, num_steps: int = 1600) -> float:
    """Error at positions 1 to 3, trimmed at a survival of 0.7, 1,000 steps after they turned from hopeless to easy."""
    rng, keys = np.random.default_rng(1), torch.arange(32)
    estimator, exploration = AcceptanceEstimator(4), Exploration(share, seed=1)
    for step in range(num_steps):
        intercepts = np.array([1.5, -4, -4, -4]) if step < 600 else np.array([1.5, 2, 2, 2])
        features, accepted, _ = draw(rng, 0.5, intercepts, 32, spread=1.0)
        lengths = (estimator.predict(features).cumprod(1) > 0.7).sum(1)
        lengths[exploration.untrimmed(keys, torch.full((32,), step))] = 4
        estimator.observe(features, outcome(lengths, torch.minimum(lengths, accepted)))
    found = estimator.predict(torch.full((1, 4, 1), 1.0))[0, 1:]
    return float((found - 1 / (1 + np.exp(-2.5))).abs().max())


def main() -> None:
    """Run the three studies and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default="estimator_robustness.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    clean = poisoned_predictions(3.0, None)
    poison = {
        name: {
            label: round(float((poisoned_predictions(limit, attack) - clean).abs().max()), 4)
            for label, limit in (("limited", 3.0), ("not limited", 1e9))
        }
        for name, attack in ATTACKS.items()
    }
    carry = {
        f"{num_requests} requests, {'after a jump' if jump else 'steady'}": {
            str(decay): round(float(np.mean([excess_loss(decay, num_requests, jump, seed) for seed in range(3)])), 5)
            for decay in (0.0, 0.5, 0.8)
        }
        for num_requests in (1, 4, 32)
        for jump in (False, True)
    }
    exploration = {str(share): round(deep_error(share), 4) for share in (0.0, 0.01, 0.02, 0.05)}
    result = {"poison_largest_move": poison, "carry_excess_log_loss": carry, "exploration_deep_error": exploration}
    print(result)
    write_result(arguments.output, result)


if __name__ == "__main__":
    main()
