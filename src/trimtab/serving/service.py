"""One generation request from its JSON to the engine and back: admission, tokens, deadline, reply."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fastapi.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from trimtab.engine.request import RequestOutput
from trimtab.engine.sampling_params import SamplingParams
from trimtab.engine.stats import EngineStats
from trimtab.llm import Completion, chat_token_ids, default_sampling
from trimtab.serving.config import ServerConfig
from trimtab.serving.engine_thread import EngineDeadError, EngineThread, StepFailedError
from trimtab.serving.errors import APIError
from trimtab.serving.metrics import ServerMetrics
from trimtab.serving.protocol import ChatCompletionRequest, CompletionRequest, GenerationRequest
from trimtab.serving.replies import Reply, speculation_fields, usage_fields

logger = logging.getLogger("trimtab.serving")
T = TypeVar("T")
Outputs = AsyncGenerator[list[RequestOutput], None]


@dataclass(slots=True, eq=False)
class Job:
    """A request that the engine has accepted.

    Attributes:
        sources: outputs of each prompt.
        echoes: text that each prompt's completions start with.
        completions: by choice index, filled as outputs arrive.
    """

    body: GenerationRequest
    reply: Reply
    params: SamplingParams
    engine_ids: list[str]
    sources: list[Outputs]
    echoes: list[str]
    started: float = field(default_factory=time.monotonic)
    completions: dict[int, Completion] = field(default_factory=dict)

    async def close(self) -> None:
        """Abort what still runs."""
        for source in self.sources:
            await source.aclose()

    def usage(self) -> dict[str, Any]:
        firsts = [done for index, done in self.completions.items() if index % self.params.n == 0]
        return usage_fields(
            sum(done.num_prompt_tokens for done in firsts),
            sum(len(done.token_ids) for done in self.completions.values()),
            sum(done.metrics.num_cached_tokens for done in firsts),
        )


class Service:
    """Serves generation requests on one engine.

    Attributes:
        draining: set when the server shuts down; new requests are refused.
    """

    def __init__(self, engine: EngineThread, config: ServerConfig, metrics: ServerMetrics, model_name: str) -> None:
        self.engine, self.config, self.metrics, self.model_name = engine, config, metrics, model_name
        self.tokenizer = engine.engine.tokenizer
        self.defaults = default_sampling(engine.engine)
        self.max_num_seqs = engine.engine.config.max_num_seqs
        self.draining = False
        self._num_reserved = 0
        self._tokenizing = ThreadPoolExecutor(2, "trimtab-tokenizer")  # so that a long prompt does not hold up the rest

    async def serve(self, body: GenerationRequest, request_id: str, receive: Receive) -> Response:
        """The response to a request; it ends early, and with it the work, when the client goes away.

        Raises:
            APIError: if the request can not be served.
        """
        job = await self._start(body, request_id)
        if body.stream:
            return EventStream(self._events(job), job.close)
        try:
            whole = await until_disconnect(receive, self._whole(job))
        finally:
            await job.close()
        return Response(status_code=499) if whole is None else JSONResponse(whole)

    async def stats(self) -> EngineStats:
        """The engine's counters.

        Raises:
            APIError: if the engine stopped.
        """
        try:
            return await self.engine.stats()
        except EngineDeadError as error:
            raise APIError(503, "the engine stopped") from error

    async def _start(self, body: GenerationRequest, request_id: str) -> Job:
        """Admit, tokenize, and hand to the engine."""
        if body.model is not None and body.model != self.model_name:
            message = f'model "{body.model[:200]}" is not served here; this server has "{self.model_name}"'
            raise APIError(404, message, "model", "model_not_found")
        try:
            params = body.sampling_params(self.defaults)
        except ValueError as error:
            raise APIError(400, str(error)) from error
        num_prompts = len(body.prompts()) if isinstance(body, CompletionRequest) else 1
        if num_prompts == 0:
            raise APIError(400, "prompt: the list is empty; give at least one prompt", "prompt")
        with self._reservation(num_prompts * params.n):
            prompts, echoes = await self._in_tokenizer(lambda: self._tokens(body))
            engine_ids = [uuid.uuid4().hex for _ in prompts]
            deadline = asyncio.get_running_loop().time() + self.config.request_timeout
            sources = [
                self.engine.generate(engine_id, tokens, params, deadline)
                for engine_id, tokens in zip(engine_ids, prompts, strict=True)
            ]
            await _accepted(sources)
        kind, prefix = ("completion", "cmpl") if isinstance(body, CompletionRequest) else ("chat", "chatcmpl")
        reply = Reply(kind, f"{prefix}-{request_id}", int(time.time()), self.model_name, self.tokenizer)  # type: ignore[arg-type]
        return Job(body, reply, params, engine_ids, sources, echoes)

    @contextmanager
    def _reservation(self, num_sequences: int) -> Iterator[None]:
        """Hold room for sequences that the engine does not know yet.

        Raises:
            APIError: if there is none.
        """
        if self.draining or not self.engine.alive:
            raise APIError(503, "the server is shutting down; try another one", retry_after=5)
        capacity = self.max_num_seqs + self.config.max_queue
        if num_sequences > capacity:
            raise APIError(
                400, f"the request asks for {num_sequences} sequences at once, at most {capacity} are served"
            )
        waiting = self.engine.num_sequences + self._num_reserved
        if waiting + num_sequences > capacity:
            raise APIError(
                429, "the queue is full; try again later", retry_after=math.ceil(waiting / self.max_num_seqs)
            )
        self._num_reserved += num_sequences
        try:
            yield
        finally:
            self._num_reserved -= num_sequences

    async def _in_tokenizer(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._tokenizing, work)
        except UnicodeEncodeError as error:
            raise APIError(400, "the text is not valid Unicode: it holds a lone surrogate") from error
        except ValueError as error:
            raise APIError(400, str(error)) from error

    def _tokens(self, body: GenerationRequest) -> tuple[list[list[int]], list[str]]:
        """Token ids of each prompt, and what its completions start with."""
        if isinstance(body, ChatCompletionRequest):
            messages = [message.as_template_input() for message in body.messages]
            "".join(message["content"] for message in messages).encode()
            options: dict[str, Any] = {"add_generation_prompt": body.add_generation_prompt}
            if body.continue_final_message:
                options = {"add_generation_prompt": False, "continue_final_message": True}
            return [chat_token_ids(self.tokenizer, messages, **options, **(body.chat_template_kwargs or {}))], [""]
        assert isinstance(body, CompletionRequest)
        tokens, echoes = [], []
        for prompt in body.prompts():
            if isinstance(prompt, str):
                prompt.encode()
            tokens.append(list(self.tokenizer(prompt).input_ids) if isinstance(prompt, str) else prompt)
            text = prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt) if body.echo else ""
            echoes.append(text if body.echo else "")
        return tokens, echoes

    async def _outputs(self, job: Job) -> AsyncGenerator[list[tuple[int, RequestOutput]], None]:
        """Outputs with the index of their choice, as they come.

        Raises:
            APIError: if the request fails on the way; what is left of it is aborted.
        """
        try:
            async with aclosing(_merged(job.sources)) as merged:
                async for prompt, outputs in merged:
                    numbered = [(prompt * job.params.n + output.index, output) for output in outputs]
                    for index, output in numbered:
                        self.metrics.record(output)
                        job.completions.setdefault(index, Completion(output.index)).extend(output)
                        if output.finish_reason == "error":
                            raise APIError(500, f"generation failed: {output.error}")
                    yield numbered
        except TimeoutError as error:
            raise APIError(408, f"the request ran longer than {self.config.request_timeout:g} seconds") from error
        except StepFailedError as error:
            raise APIError(500, str(error)) from error
        except EngineDeadError as error:
            raise APIError(503, f"{error}; try another server", retry_after=5) from error
        finally:
            for engine_id in job.engine_ids:
                self.metrics.forget(engine_id, job.params.n)
            self._log(job)

    async def _whole(self, job: Job) -> dict[str, Any]:
        async with aclosing(self._outputs(job)) as outputs:
            async for _ in outputs:
                pass
        choices = [
            job.reply.choice(index, job.echoes[index // job.params.n] + done.text, done.logprobs, done.finish_reason)
            for index, done in sorted(job.completions.items())
        ]
        return job.reply.whole(choices, job.usage()) | self._metrics(job)

    async def _events(self, job: Job) -> AsyncGenerator[bytes, None]:
        """Server-sent events of a request, those of one step together."""
        usage = {"usage": None} if job.body.include_usage else {}
        num_choices = len(job.sources) * job.params.n
        if job.reply.kind == "chat":
            roles = [job.reply.delta(index, "", role="assistant") for index in range(num_choices)]
            yield b"".join(_event(job.reply.chunk([role], **usage)) for role in roles)
        elif any(job.echoes):
            echoes = [job.reply.delta(index, job.echoes[index // job.params.n]) for index in range(num_choices)]
            yield b"".join(_event(job.reply.chunk([echo], **usage)) for echo in echoes)
        try:
            async with aclosing(self._outputs(job)) as steps:
                async for outputs in steps:
                    deltas = [delta for index, output in outputs for delta in self._deltas(job, index, output)]
                    if deltas:
                        yield b"".join(_event(job.reply.chunk([delta], **usage)) for delta in deltas)
        except APIError as error:
            yield _event(error.body())
        else:
            if job.body.include_usage:
                yield _event(job.reply.chunk([], usage=job.usage(), **self._metrics(job)))
        yield b"data: [DONE]\n\n"

    def _deltas(self, job: Job, index: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        if output.text or output.logprobs:
            yield job.reply.delta(index, output.text, output.logprobs)
        if output.finish_reason is not None:
            yield job.reply.delta(index, finish_reason=output.finish_reason)

    def _metrics(self, job: Job) -> dict[str, Any]:
        """vLLM reports them where the reply is one sequence."""
        level = self.config.per_request_spec_decode_metrics
        if level == "none" and job.body.include_metrics:
            level = "detailed"
        if level == "none" or len(job.completions) != 1:
            return {}
        num_positions = self.engine.engine.scheduler.num_draft_positions
        return {"metrics": speculation_fields(job.completions[0].metrics, num_positions, level == "detailed")}

    def _log(self, job: Job) -> None:
        if not self.config.enable_log_requests:
            return
        reasons = sorted({done.finish_reason or "unfinished" for done in job.completions.values()})
        usage = job.usage()
        logger.info(
            "request id=%s prompt_tokens=%d completion_tokens=%d seconds=%.3f outcome=%s user=%r",
            job.reply.reply_id,
            usage["prompt_tokens"],
            usage["completion_tokens"],
            time.monotonic() - job.started,
            "+".join(reasons) or "unfinished",
            job.body.user,
        )


class EventStream(Response):
    """Server-sent events; when the client goes away the source is closed, and with it the work behind it."""

    def __init__(self, source: AsyncGenerator[bytes, None], close: Callable[[], Awaitable[None]]) -> None:
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._source, self._close = source, close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(receive, self._send_all(send))
        finally:
            await self._close()

    async def _send_all(self, send: Send) -> bool:
        async with aclosing(self._source) as source:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for data in source:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        return True


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of ``work``, or None after cancelling it because the client went away."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _accepted(sources: Sequence[Outputs]) -> None:
    """Wait until the engine has taken every request, or withdraw all if it refuses one."""
    answers = await asyncio.gather(*(anext(source) for source in sources), return_exceptions=True)
    refusal = next((answer for answer in answers if isinstance(answer, BaseException)), None)
    if refusal is None:
        return
    for source in sources:
        await source.aclose()
    if isinstance(refusal, EngineDeadError):
        raise APIError(503, f"{refusal}; try another server", retry_after=5)
    if isinstance(refusal, StepFailedError):
        raise APIError(500, str(refusal))
    if isinstance(refusal, TimeoutError):
        raise APIError(408, "the request waited too long")
    if isinstance(refusal, ValueError):
        raise APIError(400, str(refusal))
    raise refusal


async def _merged(sources: Sequence[Outputs]) -> AsyncGenerator[tuple[int, list[RequestOutput]], None]:
    """What all sources give, with the number of the source, in the order of arrival."""
    arrived: asyncio.Queue[tuple[int, list[RequestOutput]] | Exception | None] = asyncio.Queue()

    async def forward(number: int, source: Outputs) -> None:
        try:
            async with aclosing(source):
                async for outputs in source:
                    arrived.put_nowait((number, outputs))
            arrived.put_nowait(None)
        except Exception as error:
            arrived.put_nowait(error)

    tasks = [asyncio.ensure_future(forward(number, source)) for number, source in enumerate(sources)]
    try:
        num_open = len(tasks)
        while num_open:
            item = await arrived.get()
            if item is None:
                num_open -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
