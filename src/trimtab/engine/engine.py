"""The engine: a plain loop of plan, forward, verify, observe, draft over a batch of requests.

>>> engine = Engine(EngineConfig(model="smollm2"))  # doctest: +SKIP
>>> engine.add_request("a", engine.tokenizer("The sea is").input_ids, SamplingParams(max_tokens=8))  # doctest: +SKIP
>>> while engine.has_unfinished:  # doctest: +SKIP
...     for output in engine.step():
...         print(output.text, end="")
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from trimtab.engine.block_pool import BlockPool
from trimtab.engine.config import EngineConfig
from trimtab.engine.detokenizer import Detokenizer
from trimtab.engine.request import DrawCounter, FinishReason, Request, RequestOutput, RequestState, seed_for
from trimtab.engine.sampling_params import SamplingParams
from trimtab.engine.scheduler import Schedule, ScheduledRequest, Scheduler
from trimtab.engine.speculation import Speculation
from trimtab.engine.stats import Counters, EngineStats, PolicyStats
from trimtab.engine.verification import VerifiedRequest, verify
from trimtab.models.executor import ForwardBatch, ModelExecutor, ModelInfo
from trimtab.models.kv_cache import KVCache
from trimtab.models.loader import LoadedModel, load_model
from trimtab.policy import request_key

Progress = Callable[[str, float], None]


class Engine:
    """Serves requests on one model. Not thread-safe: one thread owns it.

    Args:
        config: validated settings.
        progress: told what is being loaded and how far that is, in [0, 1].

    Raises:
        ModelLoadError: if the model can not be loaded.
        ValueError: for settings that do not fit the model or the machine.
    """

    def __init__(self, config: EngineConfig, progress: Progress | None = None) -> None:
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        loaded = load_model(
            config.model, config.dtype, config.device, config.tokenizer, config.max_model_len, progress=progress
        )
        self.config = config
        self.tokenizer = loaded.tokenizer
        self.max_model_len = _max_model_len(config, loaded)
        num_blocks = _num_blocks(config, loaded, self.max_model_len)
        self.executor = ModelExecutor(loaded, num_blocks, config.block_size)
        self.num_ids = min(self.executor.info.vocab_size, len(self.tokenizer))
        self.speculation: Speculation | None = None
        if config.speculative_config is not None:
            if progress is not None:
                progress("preparing the drafter", 0.9)
            self.speculation = Speculation.start(config, self.executor, self.num_ids, self.max_model_len)
        num_positions = self.speculation.num_positions if self.speculation is not None else 0
        self.counters = Counters.start(num_positions)
        self.scheduler = Scheduler(
            BlockPool(num_blocks, config.enable_prefix_caching),
            config.block_size,
            config.max_num_seqs,
            config.max_num_batched_tokens,
            self.max_model_len,
            num_positions,
            hash_lookahead=int(num_positions > 0),
        )
        self._requests: dict[str, list[Request]] = {}
        self._ready: list[RequestOutput] = []  # of requests that ended between steps

    @property
    def model_info(self) -> ModelInfo:
        return self.executor.info

    @property
    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished or bool(self._ready)

    def add_request(self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        """Queue a prompt; with n completions, outputs tell them apart by index.

        Raises:
            ValueError: for an id in use, a prompt that is empty or too long, or token ids that do not exist.
        """
        tokens = list(prompt_token_ids)
        self._check(request_id, tokens, params)
        stop_ids = () if params.ignore_eos else self.model_info.eos_token_ids
        for index in range(params.n):
            name = f"{request_id}/{index}" if params.n > 1 else request_id
            own = params if params.seed is None else replace(params, seed=params.seed + index)
            request = Request(
                request_id=request_id,
                index=index,
                prompt_len=len(tokens),
                params=own,
                tokens=list(tokens),
                draws=DrawCounter(seed_for(name, own, self.config.seed)),
                max_len=min(self.max_model_len, len(tokens) + (params.max_tokens or self.max_model_len)),
                key=request_key(name),
                stop_ids=tuple({*stop_ids, *params.stop_token_ids}),
                detokenizer=Detokenizer(self.tokenizer, tokens, params.stop),
            )
            self._requests.setdefault(request_id, []).append(request)
            self.scheduler.add(request)

    def _check(self, request_id: str, tokens: list[int], params: SamplingParams) -> None:
        if request_id in self._requests:
            raise ValueError(f'request id "{request_id}" is in use; give each request its own')
        if not tokens:
            raise ValueError("the prompt has no tokens; give at least one")
        if len(tokens) >= self.max_model_len:
            raise ValueError(
                f"the prompt has {len(tokens)} tokens, which leaves no room for output in a context of "
                f"{self.max_model_len}; shorten it or raise --max-model-len"
            )
        named = {"prompt": tokens, "logit_bias": params.logit_bias or (), "stop_token_ids": params.stop_token_ids}
        for name, ids in named.items():
            outside = [token for token in ids if not 0 <= token < self.num_ids]
            if outside:
                raise ValueError(f"{name} holds token id {outside[0]}; ids run from 0 to {self.num_ids - 1}")

    def abort(self, request_id: str) -> None:
        """End a request; its last output, of reason "abort", comes with the next step. Unknown ids are ignored."""
        for request in list(self._requests.get(request_id, ())):
            self._finish(request, "abort")
            self._ready.append(self._output(request, [], None))

    @torch.inference_mode()
    def step(self) -> list[RequestOutput]:
        """Run one step and return what it gave to which request."""
        outputs, self._ready = self._ready, []
        if not self.scheduler.has_unfinished:
            return outputs
        start = time.perf_counter()
        with self._phase("plan"):
            schedule = self._plan()
        if not schedule.requests:
            return outputs
        with self._phase("forward"):
            logits, features = self._forward(schedule)
        with self._phase("verify"):
            verified = self._verify(schedule, logits)
            outputs += self._commit(schedule, verified, features)
        with self._phase("observe"):
            self._observe(schedule, verified, start)
        with self._phase("draft"):
            self._draft(schedule)
        return outputs

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.counters.phase_seconds[name] += time.perf_counter() - start

    def _plan(self) -> Schedule:
        """Who computes what, and how many drafts of each are verified."""
        schedule = self.scheduler.schedule()
        if self.speculation is not None and schedule.requests:
            self.speculation.plan(schedule)
        return schedule

    def _forward(self, schedule: Schedule) -> tuple[Tensor, Tensor | None]:
        """One pass over all scheduled tokens: logits of the rows to verify, features of every row."""
        token_ids: list[int] = []
        logit_rows: list[int] = []
        query_lens, context_lens, tables = [], [], []
        for scheduled in schedule.requests:
            request, start = scheduled.request, scheduled.request.num_computed
            token_ids += request.tokens[start : start + scheduled.num_tokens]
            if scheduled.produces:
                logit_rows += range(len(token_ids) - 1, len(token_ids) + scheduled.num_drafts)
            if scheduled.num_drafts and request.draft is not None:
                token_ids += request.draft.tokens[: scheduled.num_drafts]
            query_lens.append(scheduled.num_tokens + scheduled.num_drafts)
            context_lens.append(start)
            tables.append(request.block_table)
        output = self.executor.forward(
            ForwardBatch(
                torch.tensor(token_ids, dtype=torch.int64),
                query_lens,
                context_lens,
                tables,
                torch.tensor(logit_rows, dtype=torch.int64),
            )
        )
        return output.logits[:, : self.num_ids].cpu(), output.features

    def _verify(self, schedule: Schedule, logits: Tensor) -> list[VerifiedRequest | None]:
        """New tokens of each scheduled request; None while its prompt is being computed."""
        producing = [scheduled for scheduled in schedule.requests if scheduled.produces]
        speculative = self.config.speculative_config
        block = speculative is not None and speculative.rejection_sample_method == "block"
        found = iter(
            verify([s.request for s in producing], [s.num_drafts for s in producing], logits, block)
            if producing
            else ()
        )
        return [next(found) if scheduled.produces else None for scheduled in schedule.requests]

    def _commit(
        self, schedule: Schedule, verified: Sequence[VerifiedRequest | None], features: Tensor | None
    ) -> list[RequestOutput]:
        """Append new tokens, end what has ended, and keep the features of computed positions for the drafter."""
        outputs = []
        row = 0
        for scheduled, result in zip(schedule.requests, verified, strict=True):
            request = scheduled.request
            num_committed = scheduled.num_tokens + (result.num_accepted if result is not None else 0)
            if features is not None and request.can_draft:
                request.features.append(features[row : row + num_committed])
            row += scheduled.num_tokens + scheduled.num_drafts
            if request.metrics.num_decode_steps == 0 and request.num_output == 0:
                self.counters.num_prompt_tokens += scheduled.num_tokens
            request.num_computed += num_committed
            if result is not None:
                outputs.append(self._emit(scheduled, result))
            if request.state is RequestState.RUNNING and self.speculation is None:
                self.scheduler.remember(request, request.num_computed)
        return outputs

    def _emit(self, scheduled: ScheduledRequest, result: VerifiedRequest) -> RequestOutput:
        """One request's new tokens up to the first that ends it."""
        request = scheduled.request
        self._count(scheduled, result)
        request.draft = None
        if result.error is not None:
            request.error = result.error
            self._finish(request, "error")
            return self._output(request, [], None)
        kept, reason = _until_stop(request, result.token_ids)
        request.tokens += kept
        self.counters.num_generated_tokens += len(kept)
        if request.metrics.first_token is None:
            request.metrics.first_token = time.monotonic()
        if reason is not None:
            self._finish(request, reason)
        return self._output(request, kept, result.logprobs[: len(kept)] if result.logprobs is not None else None)

    def _count(self, scheduled: ScheduledRequest, result: VerifiedRequest) -> None:
        metrics, counters = scheduled.request.metrics, self.counters
        if scheduled.request.num_output == 0:
            return  # its first token comes from prefill
        metrics.num_decode_steps += 1
        counters.num_decode_steps += 1
        drafted, checked, accepted = scheduled.request.num_drafts, scheduled.num_drafts, result.num_accepted
        if drafted:
            counters.count_slots(drafted, checked, accepted)
            metrics.num_drafted += drafted
            metrics.num_verified += checked
            metrics.num_accepted += accepted
        if checked:
            metrics.num_spec_steps += 1
            metrics.accepted_histogram[accepted] += 1
            metrics.accepted_by_verified[checked, accepted] += 1

    def _output(self, request: Request, token_ids: list[int], logprobs: Any) -> RequestOutput:
        return RequestOutput(
            request_id=request.request_id,
            index=request.index,
            text=request.detokenizer.take(request.finish_reason is not None),
            token_ids=token_ids,
            logprobs=logprobs,
            finish_reason=request.finish_reason,
            metrics=request.metrics,
            num_prompt_tokens=request.prompt_len,
            error=request.error,
        )

    def _finish(self, request: Request, reason: FinishReason) -> None:
        freed = self.scheduler.finish(request, reason)
        if reason == "error":  # what it wrote may be NaN, which would reach the blocks' next owner even where masked
            self.executor.cache.clear(freed)
        self.counters.finished[reason] += 1
        siblings = self._requests[request.request_id]
        siblings.remove(request)
        if not siblings:
            del self._requests[request.request_id]

    def _observe(self, schedule: Schedule, verified: Sequence[VerifiedRequest | None], start: float) -> None:
        """Labels to the confidence source, the step's time to the cost model."""
        self.counters.num_steps += 1
        if self.speculation is not None:
            accepted = [
                result.num_accepted if result is not None and result.error is None else None for result in verified
            ]
            self.counters.budget_histogram[sum(scheduled.num_drafts for scheduled in schedule.requests)] += 1
            self.speculation.observe(accepted, 1e3 * (time.perf_counter() - start))

    def _draft(self, schedule: Schedule) -> None:
        """Let the drafter follow what was committed and propose the next drafts."""
        if self.speculation is None:
            return
        requests = [s.request for s in schedule.requests if s.request.state is RequestState.RUNNING]
        self.speculation.draft(requests, self.counters)
        for request in requests:
            seen = request.num_drafter_seen if request.can_draft else 0
            self.scheduler.remember(request, seen)

    def stats(self) -> EngineStats:
        """A snapshot of all counters."""
        scheduler, pool = self.scheduler, self.scheduler.pool
        return self.counters.snapshot(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            kv_usage=pool.num_owned / pool.num_blocks,
            num_preemptions=scheduler.num_preemptions,
            num_cached_tokens=scheduler.num_cached_tokens,
            policy=self.speculation.stats() if self.speculation is not None else PolicyStats(),
        )

    def close(self) -> None:
        """Save what was learned."""
        if self.speculation is not None:
            self.speculation.save()


def _until_stop(request: Request, token_ids: list[int]) -> tuple[list[int], FinishReason | None]:
    """The tokens that belong to the output and why it ends with them; text goes to the detokenizer."""
    params = request.params
    kept = token_ids[: request.room]
    reason: FinishReason | None = "length" if len(kept) == request.room else None
    for count, token in enumerate(kept, start=1):
        if token in request.stop_ids and request.num_output + count > params.min_tokens:
            kept, reason = kept[:count], "stop"
            break
    text_ids = kept[:-1] if reason == "stop" else kept
    count = request.detokenizer.push(text_ids, num_exempt=params.min_tokens - request.num_output)
    if request.detokenizer.stopped:
        return kept[:count], "stop"
    return kept, reason


def _text_config(loaded: LoadedModel) -> Any:
    return loaded.model.config.get_text_config()


def _max_model_len(config: EngineConfig, loaded: LoadedModel) -> int:
    limit: int = getattr(_text_config(loaded), "max_position_embeddings", None) or 2048
    if config.max_model_len is None:
        return limit
    if config.max_model_len > limit:
        raise ValueError(
            f"max_model_len is {config.max_model_len}, the model was made for {limit}; use {limit} or less"
        )
    return config.max_model_len


def _num_blocks(config: EngineConfig, loaded: LoadedModel, max_model_len: int) -> int:
    """Blocks of the cache: as asked, else what fits into the memory, but no more than all requests can use."""
    text = _text_config(loaded)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    dtype = next(loaded.model.get_input_embeddings().parameters()).dtype
    block_bytes = KVCache.bytes_per_block(text.num_hidden_layers, config.block_size, heads, head_dim, dtype)
    most = config.max_num_seqs * -(-max_model_len // config.block_size)
    num_blocks = config.num_kv_blocks or min(most, int(config.kv_cache_memory_gb * 2**30 / block_bytes))
    needed = -(-max_model_len // config.block_size)
    if num_blocks < needed:
        fits = num_blocks * config.block_size
        raise ValueError(
            f"the cache holds {fits} tokens, one request of max_model_len {max_model_len} needs more; "
            f"use --max-model-len {fits} or less, or a larger cache (--kv-cache-memory-gb, --num-kv-blocks)"
        )
    return num_blocks
