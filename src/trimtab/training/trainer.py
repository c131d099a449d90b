"""Stage 3: one loop for every kind. A batch of anchors in, a whole draft predicted from each, one step of AdamW."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trimtab.drafters.dflash import BlockNetwork
from trimtab.drafters.dspark import DSparkNetwork
from trimtab.drafters.networks import AutoregressiveNetwork, DraftNetwork
from trimtab.training.batches import AnchorAttention, AnchorBatch, Sampling, build_batch, choose_anchors, epoch
from trimtab.training.losses import confidence_loss, overlap_loss
from trimtab.training.store import Sample, StoreReader

POSITION_DECAY = 4.0  # weight exp(-k / 4) of draft position k, as in DFlash


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """Options of one run.

    Attributes:
        minutes, epochs: length of the run, in time if ``minutes`` is given, else in passes over the data as it is at
            the start; the learning rate is set by the share of it that has passed.
        rows_per_batch: anchors x predictions per step.
        decay_share: the last share of the run in which the learning rate falls to a twentieth.
        ce_weight: share of cross entropy at the start and at the end; the rest is total variation.
    """

    minutes: float | None = None
    epochs: float = 5.0
    learning_rate: float = 1e-3
    rows_per_batch: int = 900
    warmup_steps: int = 20
    decay_share: float = 0.4
    ce_weight: tuple[float, float] = (0.7, 0.1)
    confidence_weight: float = 1.0
    seed: int = 0
    evaluate_every: float = 180.0  # seconds


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Held-out quality, teacher-forced along the target's own answers.

    Attributes:
        acceptance: ``[K]`` acceptance probability at temperature 1, given that all before were accepted.
        agreement: ``[K]`` how often draft and target agree on the best token, likewise.
        length: 1 + expected accepted tokens per step; `greedy_length` the same for agreement.
    """

    acceptance: list[float]
    agreement: list[float]
    length: float
    greedy_length: float
    confidence_error: float | None

    def __str__(self) -> str:
        numbers = "/".join(f"{value:.3f}"[1:] for value in self.acceptance)
        greedy = "/".join(f"{value:.3f}"[1:] for value in self.agreement)
        return f"length {self.length:.3f} ({numbers}), greedy {self.greedy_length:.3f} ({greedy})"


@dataclass(frozen=True, slots=True)
class DraftOutput:
    """Hidden states ``[A, K, hidden]``, Markov latents ``[A, K, rank]`` and confidence logits ``[A, K]``."""

    hidden: Tensor
    latent: Tensor | None
    confidence: Tensor | None


def draft(network: DraftNetwork, batch: AnchorBatch) -> DraftOutput:
    """Predict a whole draft from each anchor, with the sequence's own tokens as the drafted ones."""
    if isinstance(network, BlockNetwork):
        context = network.context(batch.features, batch.positions)
        attend = AnchorAttention(batch, context, 0, network.shape.block_size)
        hidden = network.block(batch.token_ids[:, 0], batch.anchor_positions, attend)
        if not isinstance(network, DSparkNetwork):
            return DraftOutput(hidden, None, None)
        latent, previous = network.latents(hidden, batch.token_ids)
        # the confidence head reads the backbone and does not shape it
        confidence = network.confidence(hidden.detach(), None if previous is None else previous.detach())
        return DraftOutput(hidden, latent, confidence)
    assert isinstance(network, AutoregressiveNetwork)
    states = network.fuse(batch.features)
    attend = AnchorAttention(batch, _context(network, states, batch), 1, 1)
    recycled, hiddens = states[batch.anchor_rows], []
    for k in range(batch.token_ids.shape[1]):
        hidden = network.advance(batch.token_ids[:, k], recycled, batch.anchor_positions - 1 + k, attend, k)
        recycled = network.recycle(hidden)
        hiddens.append(network.head_input(hidden))
    return DraftOutput(torch.stack(hiddens, dim=1), None, None)


class _StopError(Exception):
    """Ends a pass once its keys and values are known."""


def _context(network: AutoregressiveNetwork, states: Tensor, batch: AnchorBatch) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of a one-layer network at every position, from the target's states.

    Raises:
        ValueError: for more than one layer, whose keys would need the whole network at every position.
    """
    if network.shape.num_layers != 1 or network.shape.num_modules != 1:
        raise ValueError("training covers autoregressive drafters of one layer and one module")
    kept: list[tuple[Tensor, Tensor]] = []

    def keep(_index: int, _queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        kept.append((keys, values))
        raise _StopError

    with contextlib.suppress(_StopError):
        network.advance(batch.next_token_ids, states, batch.positions, keep, 0)
    return kept


def slot_weights(batch: AnchorBatch) -> Tensor:
    """``[A, K]`` loss weights that sum to 1."""
    decay = torch.exp(-torch.arange(batch.valid.shape[1]) / POSITION_DECAY)
    weights = batch.valid * decay
    return weights / weights.sum().clamp_min(1e-9)


class Trainer:
    """Trains a network on a store; its state can be saved and resumed.

    Args:
        head: ``[draft_vocab_size, hidden_size]`` head rows (the target's), not trained.
        to_draft: ``[vocab_size]`` draft id of each target id, or -1.
        final_norm: the target's, for networks that read its last hidden state behind it.
    """

    def __init__(
        self,
        network: DraftNetwork,
        reader: StoreReader,
        head: Tensor,
        to_draft: Tensor,
        sampling: Sampling,
        options: TrainOptions,
        final_norm: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.network, self.reader, self.head, self.to_draft = network, reader, head, to_draft
        self.sampling, self.options, self.final_norm = sampling, options, final_norm
        trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, options.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
        self.generator = torch.Generator().manual_seed(options.seed)
        self.columns = feature_columns(network, reader)
        self.step_count = 0
        self.tokens_seen = 0
        self.share = 0.0
        self.history: list[dict[str, Any]] = []

    def held_out(self) -> tuple[list[Sample], list[Sample]]:
        """Samples to train on and samples (every fortieth, at most 32; of little data every tenth) only to evaluate.

        Raises:
            ValueError: if there are too few answers to hold any out.
        """
        samples = [sample for sample in self.reader.samples if sample.num_rows > sample.prompt_len + 8]
        if len(samples) < 10:
            raise ValueError(f"only {len(samples)} answers are longer than 8 tokens; training needs 10 or more")
        kept = {sample.id for sample in samples[:: 40 if len(samples) >= 400 else 10][:32]}
        return [s for s in samples if s.id not in kept], [s for s in samples if s.id in kept]

    def run(self, save: Callable[[], None], report: Callable[[str], None]) -> None:
        """Train to the end of the run; `save` and `report` are called at every evaluation.

        An interrupted run goes on where it was saved; a finished one begins another over the data that is there now.
        """
        started = last_evaluation = time.monotonic()
        base = self.share if self.share < 1 else 0.0
        first_step, first_tokens = self.step_count, self.tokens_seen
        total = self.options.epochs * self.reader.refresh()
        while True:
            self.reader.refresh()
            training, held_out = self.held_out()
            batches = epoch(
                self.reader, training, self.to_draft, self.sampling, self.options.rows_per_batch, self.generator
            )
            for batch in batches:
                seconds = time.monotonic() - started
                minutes = self.options.minutes
                passed = seconds / (60 * minutes) if minutes else (self.tokens_seen - first_tokens) / total
                self.share = base + passed
                metrics = self.step(self._select(batch), self.share, self.step_count - first_step)
                if time.monotonic() - last_evaluation > self.options.evaluate_every or self.share >= 1:
                    self._evaluate_and_save(held_out, metrics, len(training), save, report)
                    last_evaluation = time.monotonic()
                if self.share >= 1:
                    return

    def _evaluate_and_save(
        self,
        held_out: Sequence[Sample],
        metrics: dict[str, float],
        num_sequences: int,
        save: Callable[[], None],
        report: Callable[[str], None],
    ) -> None:
        evaluation = self.evaluate(held_out)
        self.history.append(
            {
                "step": self.step_count,
                "tokens_seen": self.tokens_seen,
                "sequences": num_sequences,
                "length": evaluation.length,
                "greedy_length": evaluation.greedy_length,
                "acceptance": evaluation.acceptance,
                "agreement": evaluation.agreement,
            }
        )
        save()
        report(
            f"{self.share:4.0%} step {self.step_count} sequences {num_sequences} tokens {self.tokens_seen} "
            f"loss {metrics['loss']:.3f} overlap {metrics['overlap']:.3f} | held out: {evaluation}"
        )

    def step(self, batch: AnchorBatch, share: float, steps_in_run: int) -> dict[str, float]:
        """One optimiser step at ``share`` of the run."""
        self.network.train()
        rate = self.options.learning_rate * learning_rate_factor(share, steps_in_run, self.options)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        first, last = self.options.ce_weight
        ce_weight = first + (last - first) * min(1.0, max(0.0, share))
        output = draft(self.network, batch)
        weights = slot_weights(batch)
        loss, overlap, _ = self._loss(output, batch, weights, ce_weight)
        total = loss
        if output.confidence is not None:
            total = total + self.options.confidence_weight * confidence_loss(
                output.confidence.flatten(), overlap, weights.flatten()
            )
        self.optimizer.zero_grad(set_to_none=True)
        total.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.optimizer.param_groups[0]["params"], 1.0)
        self.optimizer.step()
        self.step_count += 1
        self.tokens_seen += len(batch.positions)
        mean = (overlap * batch.valid.flatten()).sum() / batch.valid.sum()
        return {"loss": float(loss.detach()), "overlap": float(mean)}

    def _loss(
        self, output: DraftOutput, batch: AnchorBatch, weights: Tensor, ce_weight: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        markov = self.network.markov_head if isinstance(self.network, DSparkNetwork) else None
        return overlap_loss(
            output.hidden.flatten(0, 1),
            None if output.latent is None else output.latent.flatten(0, 1),
            self.head,
            None if markov is None else markov.markov_w2.weight,
            batch.teacher_ids.flatten(0, 1),
            batch.teacher_probs.flatten(0, 1),
            weights.flatten(),
            ce_weight,
        )

    def evaluate(self, samples: Sequence[Sample]) -> Evaluation:
        """Acceptance on answers of ``samples``."""
        overlap, agree, confidence = self.judge(samples)
        error = None if confidence is None else float((confidence.sigmoid() - overlap).abs().mean())
        return Evaluation(conditional(overlap), conditional(agree), 1 + survival(overlap), 1 + survival(agree), error)

    @torch.no_grad()
    def judge(self, samples: Sequence[Sample], density: float = 0.3) -> tuple[Tensor, Tensor, Tensor | None]:
        """Acceptance probability, agreement on the best token and confidence logits, ``[A, K]`` each.

        Anchors lie in answers only, and far enough from their end to have K predictions.
        """
        self.network.eval()
        generator = torch.Generator().manual_seed(1)
        depth = self.sampling.num_predictions
        sampling = Sampling(depth, density, self.sampling.first_position, 0.0)
        overlaps, agreements, confidences = [], [], []
        for start in range(0, len(samples), 8):
            chosen = [(sample, choose_anchors(sample, sampling, generator)) for sample in samples[start : start + 8]]
            chosen = [(sample, anchors[anchors + depth <= sample.num_rows]) for sample, anchors in chosen]
            pairs = [(sample, anchors) for sample, anchors in chosen if len(anchors)]
            if not pairs:
                continue
            batch = self._select(
                build_batch(self.reader, [s for s, _ in pairs], [a for _, a in pairs], self.to_draft, sampling)
            )
            output = draft(self.network, batch)
            _, overlap, agree = self._loss(output, batch, slot_weights(batch), 1.0)
            overlaps.append(overlap.view(batch.valid.shape))
            agreements.append(agree.view(batch.valid.shape))
            if output.confidence is not None:
                confidences.append(output.confidence)
        if not overlaps and density < 1:
            return self.judge(samples, 1.0)
        return torch.cat(overlaps), torch.cat(agreements), torch.cat(confidences) if confidences else None

    def _select(self, batch: AnchorBatch) -> AnchorBatch:
        """The batch with only the features that the network reads."""
        features = batch.features[:, self.columns]
        if self.final_norm is not None:
            with torch.no_grad():
                features = self.final_norm(features)
        return replace(batch, features=features)

    def state(self) -> dict[str, Any]:
        return {
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
            "step_count": self.step_count,
            "tokens_seen": self.tokens_seen,
            "share": self.share,
            "history": self.history,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self.network.load_state_dict(state["network"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"])
        self.step_count, self.tokens_seen = state["step_count"], state["tokens_seen"]
        self.share = state.get("share", 1.0)
        self.history = state["history"]


def feature_columns(network: DraftNetwork, reader: StoreReader) -> Tensor:
    """Columns of the store's features at the network's taps.

    Raises:
        ValueError: if the store lacks one.
    """
    layout, size = reader.layout, reader.layout.hidden_size
    missing = [tap for tap in network.shape.taps if tap not in layout.taps]
    if missing:
        raise ValueError(f"the store holds taps {layout.taps}, the drafter needs {missing}; extract features again")
    starts = [layout.taps.index(tap) * size for tap in network.shape.taps]
    return torch.cat([torch.arange(start, start + size) for start in starts])


def conditional(overlap: Tensor) -> list[float]:
    """``[K]`` acceptance given survival so far, from per-slot probabilities ``[A, K]``."""
    survived = torch.cat([torch.ones(len(overlap), 1), overlap.cumprod(1)], dim=1)
    return (survived[:, 1:].sum(0) / survived[:, :-1].sum(0).clamp_min(1e-9)).tolist()


def survival(overlap: Tensor) -> float:
    """Expected accepted tokens of a draft, from per-slot probabilities ``[A, K]``."""
    return float(overlap.cumprod(1).sum(1).mean())


def learning_rate_factor(share: float, steps: int, options: TrainOptions) -> float:
    """Warm up, hold, then fall along a cosine to a twentieth over the last ``decay_share`` of the run."""
    warm = min(1.0, (steps + 1) / options.warmup_steps)
    late = max(0.0, min(1.0, (share - 1 + options.decay_share) / options.decay_share))
    return warm * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * late)))


def save_state(trainer: Trainer, path: Path, extra: dict[str, Any]) -> None:
    staging = path.with_suffix(".tmp")
    torch.save({**trainer.state(), **extra}, staging)
    staging.replace(path)
