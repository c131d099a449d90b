"""Training batches: some positions of a few sequences are anchors from which a whole draft is predicted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from trimtab.training.store import Sample, StoreReader


@dataclass(frozen=True, slots=True)
class AnchorBatch:
    """B sequences of T rows in all, and A anchors in them, each with K predictions.

    Attributes:
        features: ``[T, width]``; ``next_token_ids``, ``positions``: ``[T]``.
        spans: ``[B]`` (first row, number of rows) of each sequence; ``anchor_spans`` likewise among the anchors.
        anchor_rows: ``[A]`` row of the position before the anchor (its last committed one).
        anchor_positions: ``[A]`` position of the anchor token in its sequence.
        token_ids: ``[A, K]`` the anchor and the tokens after it: what stands before each prediction.
        teacher_ids, teacher_probs: ``[A, K, teacher_size]``; ids of the draft vocabulary or -1.
        valid: ``[A, K]`` float, 0 past the end of the sequence.
    """

    features: Tensor
    next_token_ids: Tensor
    positions: Tensor
    spans: Sequence[tuple[int, int]]
    anchor_spans: Sequence[tuple[int, int]]
    anchor_rows: Tensor
    anchor_positions: Tensor
    token_ids: Tensor
    teacher_ids: Tensor
    teacher_probs: Tensor
    valid: Tensor


class AnchorAttention:
    """Attention of anchored drafts: each row sees its sequence before the anchor and earlier rows of its own draft."""

    def __init__(self, batch: AnchorBatch, context: list[tuple[Tensor, Tensor]], before: int, block_size: int) -> None:
        """Args: ``before``: the context ends this many positions before the anchor; ``block_size``: rows per call."""
        self.batch, self.context, self.block_size = batch, context, block_size
        self.drafted: list[tuple[Tensor, Tensor] | None] = [None] * len(context)
        self.limits = batch.anchor_positions - before
        self._masks: dict[int, list[Tensor]] = {}

    def __call__(self, index: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        size = self.block_size
        keys, values = (states.view(-1, size, *states.shape[1:]) for states in (keys, values))
        earlier = self.drafted[index]
        if earlier is not None:
            keys, values = torch.cat([earlier[0], keys], dim=1), torch.cat([earlier[1], values], dim=1)
        self.drafted[index] = keys, values
        queries = queries.view(-1, size, *queries.shape[1:])
        outputs = []
        for span, anchors, mask in zip(
            self.batch.spans, self.batch.anchor_spans, self._mask(keys.shape[1]), strict=True
        ):
            rows, drafts = slice(span[0], sum(span)), slice(anchors[0], sum(anchors))
            all_keys = torch.cat([self.context[index][0][rows], keys[drafts].flatten(0, 1)])
            all_values = torch.cat([self.context[index][1][rows], values[drafts].flatten(0, 1)])
            attended = scaled_dot_product_attention(
                queries[drafts].flatten(0, 1).transpose(0, 1).unsqueeze(0),
                all_keys.transpose(0, 1).unsqueeze(0),
                all_values.transpose(0, 1).unsqueeze(0),
                attn_mask=mask,
                enable_gqa=True,
            )
            outputs.append(attended[0].transpose(0, 1))
        return torch.cat(outputs)

    def _mask(self, drafted: int) -> list[Tensor]:
        if drafted not in self._masks:
            masks = []
            for span, anchors in zip(self.batch.spans, self.batch.anchor_spans, strict=True):
                limits = self.limits[anchors[0] : sum(anchors)]
                sees_context = torch.arange(span[1]) < limits.unsqueeze(1)
                own = torch.eye(anchors[1], dtype=torch.bool).repeat_interleave(drafted, dim=1)
                visible = torch.cat([sees_context, own], dim=1).repeat_interleave(self.block_size, dim=0)
                masks.append(torch.zeros(visible.shape).masked_fill_(~visible, float("-inf")))
            self._masks[drafted] = masks
        return self._masks[drafted]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How anchors are chosen.

    Attributes:
        num_predictions: K.
        density: share of possible positions that become anchors.
        first_position: no anchor before it (what all prompts begin with teaches nothing).
        prompt_weight: share of ``density`` used inside prompts.
    """

    num_predictions: int
    density: float
    first_position: int
    prompt_weight: float


def common_prefix(samples: Sequence[Sample]) -> int:
    """Number of leading tokens that all sequences share (the chat template's opening)."""
    length = 0
    for column in zip(*(sample.token_ids[: sample.prompt_len] for sample in samples), strict=False):
        if len(set(column)) > 1:
            break
        length += 1
    return length


def choose_anchors(sample: Sample, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """Anchor positions of one sequence, ascending; each leaves at least one prediction."""
    positions = torch.arange(max(sampling.first_position, 1), sample.num_rows)
    if not len(positions):
        return positions
    chance = torch.full((len(positions),), sampling.density)
    chance[positions < sample.prompt_len] *= sampling.prompt_weight
    return positions[torch.rand(len(positions), generator=generator) < chance]


def build_batch(
    reader: StoreReader, samples: Sequence[Sample], anchors: Sequence[Tensor], to_draft: Tensor, sampling: Sampling
) -> AnchorBatch:
    """Assemble a batch; ``to_draft [vocab_size]`` maps target ids to draft ids or -1."""
    depth = torch.arange(sampling.num_predictions)
    parts: dict[str, list[Tensor]] = {name: [] for name in ("features", "next", "positions", "rows", "ids", "valid")}
    teacher_ids, teacher_probs, spans, anchor_spans = [], [], [], []
    first_row = first_anchor = 0
    for sample, chosen in zip(samples, anchors, strict=True):
        tokens = torch.tensor(sample.token_ids)
        index = chosen.unsqueeze(1) + depth  # [A, K] token before each prediction = row that predicts it in the target
        valid = index < sample.num_rows
        index = index.clamp(max=sample.num_rows - 1)
        ids, probs = reader.teacher(sample)
        teacher_ids.append(to_draft[ids[index]])
        teacher_probs.append(probs[index])
        parts["features"].append(reader.features(sample))
        parts["next"].append(tokens[1:])
        parts["positions"].append(torch.arange(sample.num_rows))
        parts["rows"].append(first_row + chosen - 1)
        parts["ids"].append(tokens[index])
        parts["valid"].append(valid.float())
        spans.append((first_row, sample.num_rows))
        anchor_spans.append((first_anchor, len(chosen)))
        first_row, first_anchor = first_row + sample.num_rows, first_anchor + len(chosen)
    joined = {name: torch.cat(values) for name, values in parts.items()}
    return AnchorBatch(
        features=joined["features"],
        next_token_ids=joined["next"],
        positions=joined["positions"],
        spans=spans,
        anchor_spans=anchor_spans,
        anchor_rows=joined["rows"],
        anchor_positions=torch.cat(list(anchors)),
        token_ids=joined["ids"],
        teacher_ids=torch.cat(teacher_ids),
        teacher_probs=torch.cat(teacher_probs),
        valid=joined["valid"],
    )


def epoch(
    reader: StoreReader,
    samples: Sequence[Sample],
    to_draft: Tensor,
    sampling: Sampling,
    rows_per_batch: int,
    generator: torch.Generator,
) -> Iterator[AnchorBatch]:
    """Every sequence once, in random order, about ``rows_per_batch`` anchors x predictions a batch."""
    chosen_samples: list[Sample] = []
    chosen_anchors: list[Tensor] = []
    rows = 0
    for index in torch.randperm(len(samples), generator=generator).tolist():
        anchors = choose_anchors(samples[index], sampling, generator)
        if not len(anchors):
            continue
        chosen_samples.append(samples[index])
        chosen_anchors.append(anchors)
        rows += len(anchors) * sampling.num_predictions
        if rows >= rows_per_batch:
            yield build_batch(reader, chosen_samples, chosen_anchors, to_draft, sampling)
            chosen_samples, chosen_anchors, rows = [], [], 0
    if chosen_samples:
        yield build_batch(reader, chosen_samples, chosen_anchors, to_draft, sampling)
