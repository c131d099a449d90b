"""Measures what a step and a draft cost on this machine, once; the result is kept per machine, model and dtype."""

from __future__ import annotations

import hashlib
import logging
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from trimtab.drafters import DraftBatch, Drafter
from trimtab.models.executor import ForwardBatch, ModelExecutor
from trimtab.models.loader import cache_dir
from trimtab.policy.cost import CostFileError, CostKey, CostModel, StepShape, profile_points

log = logging.getLogger(__name__)

MAX_PROFILED_TOKENS = 256
TIME_LIMIT = 5.0  # seconds; shapes that are left get what the ones before them say


def cost_model(
    executor: ModelExecutor, drafter: Drafter, max_num_seqs: int, max_tokens: int, state_dir: str | None
) -> tuple[CostModel, Path]:
    """The kept cost model of this machine and pair of models, or a fresh profile; and where to keep it."""
    key = _key(executor, drafter)
    name = hashlib.sha256(repr(key).encode()).hexdigest()[:16]
    path = (Path(state_dir) if state_dir else cache_dir() / "state") / f"cost-{name}.json"
    try:
        return CostModel.load(path, key), path
    except FileNotFoundError:
        pass
    except CostFileError as error:
        log.warning("profiling again: %s", error)
    model = profile(executor, drafter, key, max_num_seqs, max_tokens)
    model.save(path)
    return model, path


def _key(executor: ModelExecutor, drafter: Drafter) -> CostKey:
    device = torch.cuda.get_device_name() if executor.device.type == "cuda" else _cpu_name()
    info = executor.info
    return CostKey(
        f"{device} {torch.get_num_threads()} threads torch {torch.__version__}",
        f"{executor.loaded.name} {info.num_layers}x{info.hidden_size} {info.vocab_size} "
        f"{drafter.name} {drafter.num_positions}",
        executor.loaded.dtype,
    )


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


@torch.inference_mode()
def profile(executor: ModelExecutor, drafter: Drafter, key: CostKey, max_num_seqs: int, max_tokens: int) -> CostModel:
    """Run real shapes through the target and the drafter; the cache must belong to nobody yet."""
    deadline = time.perf_counter() + TIME_LIMIT
    blocks = executor.cache.num_blocks
    num_requests = min(max_num_seqs, blocks)
    context = min(256, (blocks // num_requests - 1) * executor.block_size)
    largest = min(MAX_PROFILED_TOKENS, max_tokens, num_requests * (1 + drafter.num_positions))
    shapes = sorted(profile_points(num_requests, largest, max(context, 1)), key=lambda shape: shape.all_tokens)
    steps: list[tuple[StepShape, float]] = []
    for shape in shapes:
        if shape.context_tokens and context < 1:
            continue
        if steps and time.perf_counter() > deadline:
            break
        batch = _batch(executor, shape)
        if batch is not None:
            repeats = 3 if shape.all_tokens <= 64 else 1
            steps += [(shape, ms) for ms in _times(lambda batch=batch: executor.forward(batch), repeats)]  # type: ignore[misc]
    drafts: list[tuple[int, int, float]] = []
    for requests in sorted({1, min(8, num_requests), num_requests}):
        for depth in sorted({1, drafter.num_positions}):
            if time.perf_counter() < deadline + TIME_LIMIT / 2:
                drafts += _draft_times(executor, drafter, requests, depth)
    return CostModel(key, steps, drafts)


def _times(action: Callable[[], object], repeats: int) -> list[float]:
    action()  # the first run of a shape pays for memory and kernel selection
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return times


def _tables(executor: ModelExecutor, lengths: list[int]) -> list[list[int]] | None:
    tables, used = [], 0
    for length in lengths:
        count = -(-length // executor.block_size)
        tables.append(list(range(used, used + count)))
        used += count
    return tables if used <= executor.cache.num_blocks else None


def _batch(executor: ModelExecutor, shape: StepShape) -> ForwardBatch | None:
    base, more = divmod(shape.num_tokens, shape.num_requests)
    query_lens = [base + (row < more) for row in range(shape.num_requests)]
    num_logits = sum(query_lens)
    if shape.prefill_tokens:
        query_lens.append(shape.prefill_tokens)
    contexts = [shape.context_tokens // len(query_lens)] * len(query_lens)
    tables = _tables(executor, [q + c for q, c in zip(query_lens, contexts, strict=True)])
    if tables is None or max(q + c for q, c in zip(query_lens, contexts, strict=True)) > executor.info.max_model_len:
        return None
    token_ids = torch.arange(sum(query_lens)) % executor.info.vocab_size
    return ForwardBatch(token_ids, query_lens, contexts, tables, torch.arange(num_logits))


class _LikelyToken:
    """A sampler that takes the most likely token and keeps nothing."""

    def __init__(self, depth: int, vocab_map: Tensor | None) -> None:
        self.depth, self._map = depth, vocab_map

    def sample(self, logits: Tensor, position: int, head_logits: Tensor | None = None) -> Tensor:
        tokens = logits.float().softmax(-1).argmax(-1)
        return tokens if self._map is None else self._map[tokens]

    def propose(self, token_ids: object) -> None:
        """Nothing to keep."""


def _draft_times(executor: ModelExecutor, drafter: Drafter, requests: int, depth: int) -> list[tuple[int, int, float]]:
    tables = _tables(executor, [2 + drafter.num_positions] * requests)
    if tables is None:
        return []
    width = len(drafter.taps) * executor.info.hidden_size
    batch = DraftBatch(
        request_ids=[str(row) for row in range(requests)],
        num_new=[1] * requests,
        start_positions=[0] * requests,
        token_ids=torch.ones(requests, dtype=torch.int64),
        next_token_ids=torch.ones(requests, dtype=torch.int64),
        features=torch.zeros(requests, width, dtype=executor.dtype) if width else None,
        block_tables=tables,
        max_drafts=[depth] * requests,
        histories=[[1, 1]] * requests,
    )
    times = _times(lambda: drafter.propose(batch, _LikelyToken(depth, drafter.vocab_map)), 2)
    return [(requests, depth, ms) for ms in times]
