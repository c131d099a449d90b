"""`check_drafter`: what the engine relies on, tried on a drafter. For authors of new kinds, and run on ours."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trimtab.drafters.base import DraftBatch, Drafter
from trimtab.models.executor import ForwardBatch, ModelExecutor

TOLERANCE = 1e-3  # of the largest logit; batches of other sizes round differently
PROMPT_LENGTHS = (7, 12)


class ConformanceError(AssertionError):
    """A drafter breaks a rule; the message names it."""


class _Recorder:
    """A sampler that draws the most likely token, remembers the logits and refuses what the protocol forbids."""

    def __init__(self, num_rows: int, depth: int, vocab_map: Tensor | None, vocab_size: int) -> None:
        self.num_rows, self.depth, self.vocab_map, self.vocab_size = num_rows, depth, vocab_map, vocab_size
        self.logits: list[Tensor] = []
        self.proposed: list[list[int]] | None = None

    def sample(self, logits: Tensor, position: int, head_logits: Tensor | None = None) -> Tensor:
        width = self.vocab_size if self.vocab_map is None else len(self.vocab_map)
        _require(position == len(self.logits), f"position {position} was sampled after {len(self.logits)} positions")
        _require(position < self.depth, f"position {position} was sampled at a depth of {self.depth}")
        shape = (self.num_rows, width)
        _require(tuple(logits.shape) == shape, f"logits are {list(logits.shape)}, expected {list(shape)}")
        _require(bool(logits.amax(-1).isfinite().all()), "a row of logits has no finite maximum")
        if head_logits is not None:
            _require(tuple(head_logits.shape) == (self.num_rows,), f"head_logits are {list(head_logits.shape)}")
        self.logits.append(logits.detach().clone())
        drawn = logits.argmax(-1)
        return drawn if self.vocab_map is None else self.vocab_map[drawn]

    def propose(self, token_ids: Sequence[Sequence[int]]) -> None:
        _require(not self.logits, "propose was called after sample in the same round")
        _require(len(token_ids) == self.num_rows, f"{len(token_ids)} drafts for {self.num_rows} drafting requests")
        for draft in token_ids:
            _require(all(0 <= token < self.vocab_size for token in draft), "a drafted token is not in the vocabulary")
        self.proposed = [list(draft) for draft in token_ids]


def check_drafter(drafter: Drafter, target: ModelExecutor, seed: int = 0) -> None:
    """Run a drafter through rounds of two requests and look for what the engine could not work with.

    Checked: its attributes; that positions are sampled in order and within the depth; that a request's draft depends
    on neither its neighbours nor on where its blocks lie; that rounds without drafts advance it; that the same text
    gives the same draft again. The executor must be idle: its cache is overwritten, its taps are set.

    Raises:
        ConformanceError: naming the first rule that is broken.
    """
    _check_attributes(drafter, target)
    target.set_taps(drafter.taps)
    generator = torch.Generator().manual_seed(seed)
    pattern = torch.randint(0, target.info.vocab_size, (4,), generator=generator)
    texts = [pattern.repeat(length // 4 + 2)[: length + 3] for length in PROMPT_LENGTHS]
    blocks = -(-(max(PROMPT_LENGTHS) + 4 + drafter.num_positions) // target.block_size)
    _require(target.cache.num_blocks >= 4 * blocks, f"the check needs an executor with {4 * blocks} blocks")
    tables = [list(range(i * blocks, (i + 1) * blocks))[::-1] for i in range(4)]
    depth = drafter.num_positions

    together = _round(drafter, target, texts, tables[:2], [(0, n) for n in PROMPT_LENGTHS], [depth] * 2, depth, "ab")
    for index, text in enumerate(texts):
        alone = _round(
            drafter, target, [text], [tables[2 + index]], [(0, PROMPT_LENGTHS[index])], [depth], depth, "cd"[index]
        )
        _compare(together, index, alone, 0, "depends on the other requests or on where its blocks lie")
    spans = [(n, n + 2) for n in PROMPT_LENGTHS]
    _round(drafter, target, texts, tables[:2], spans, [0, 0], 0, "ab")
    later = _round(drafter, target, texts, tables[:2], [(e, e + 1) for _, e in spans][:2], [depth] * 2, 1, "ab", True)
    again = _round(drafter, target, texts, tables[2:], [(0, e + 1) for _, e in spans], [depth] * 2, 1, "ef", True)
    for index in range(2):
        _compare(later, index, again, index, "differs after a round without drafts")


def _check_attributes(drafter: Drafter, target: ModelExecutor) -> None:
    _require(isinstance(drafter, Drafter), "it lacks an attribute of the Drafter protocol")
    _require(drafter.num_positions >= 1, f"num_positions is {drafter.num_positions}")
    _require(drafter.max_position >= 1, f"max_position is {drafter.max_position}")
    outside = [tap for tap in drafter.taps if not 0 <= tap <= target.info.num_layers]
    _require(not outside, f"taps {outside} are outside the target's {target.info.num_layers} layers")
    if drafter.vocab_map is not None:
        ids = drafter.vocab_map
        _require(ids.dtype == torch.int64 and ids.dim() == 1, "vocab_map is not a vector of int64")
        _require(len(torch.unique(ids)) == len(ids), "vocab_map names a target id twice")
        _require(int(ids.min()) >= 0 and int(ids.max()) < target.info.vocab_size, "vocab_map leaves the vocabulary")


def _round(
    drafter: Drafter,
    target: ModelExecutor,
    texts: Sequence[Tensor],
    tables: Sequence[Sequence[int]],
    spans: Sequence[tuple[int, int]],
    max_drafts: Sequence[int],
    depth: int,
    names: str,
    wrap: bool = False,
) -> _Recorder:
    """Commit positions [start, end) of each text, with the target's true features, and draft."""
    if wrap:
        texts = [torch.cat([text, text[-4:]]) for text in texts]
    token_ids = torch.cat([text[start:end] for text, (start, end) in zip(texts, spans, strict=True)])
    lengths, starts = [end - start for start, end in spans], [start for start, _ in spans]
    output = target.forward(ForwardBatch(token_ids, lengths, starts, tables, torch.tensor([0])))
    batch = DraftBatch(
        request_ids=list(names[: len(spans)]),
        num_new=lengths,
        start_positions=starts,
        token_ids=token_ids,
        next_token_ids=torch.cat([text[s + 1 : e + 1] for text, (s, e) in zip(texts, spans, strict=True)]),
        features=output.features,
        block_tables=tables,
        max_drafts=max_drafts,
        histories=[text[: end + 1].tolist() for text, (_, end) in zip(texts, spans, strict=True)],
    )
    sampler = _Recorder(len(batch.drafting), depth, drafter.vocab_map, target.info.vocab_size)
    drafter.propose(batch, sampler)
    return sampler


def _compare(first: _Recorder, row: int, second: _Recorder, other: int, problem: str) -> None:
    if first.proposed is not None and second.proposed is not None:
        _require(first.proposed[row] == second.proposed[other], f"a draft {problem}")
        return
    _require(len(first.logits) == len(second.logits), f"the length of a draft {problem}")
    for k, (one, two) in enumerate(zip(first.logits, second.logits, strict=True)):
        a, b = one[row].float(), two[other].float()
        same = torch.equal(a.isfinite(), b.isfinite())
        finite = a.isfinite() & b.isfinite()
        error = float((a[finite] - b[finite]).abs().max())
        limit = TOLERANCE * (1 + float(a[finite].abs().max()))
        _require(same and error <= limit, f"the draft law of position {k} {problem} (by {error:.2g})")


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise ConformanceError(problem)
