"""Generate from Python: prompts in, finished texts out.

>>> llm = LLM("smollm2")  # doctest: +SKIP
>>> llm.generate(["The sea is"], SamplingParams(max_tokens=16))[0].text  # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from trimtab.engine.config import EngineConfig, SpeculativeConfig
from trimtab.engine.engine import Engine
from trimtab.engine.request import FinishReason, RequestMetrics, RequestOutput, TokenLogprob
from trimtab.engine.sampling_params import SamplingParams

Prompt = str | Sequence[int]
Conversation = Sequence[Mapping[str, str]]


class GenerationError(RuntimeError):
    """A request failed in the engine."""


@dataclass(slots=True)
class Completion:
    """One finished output."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    num_prompt_tokens: int = 0
    error: str | None = None

    def extend(self, output: RequestOutput) -> None:
        """Add what one step gave."""
        self.text += output.text
        self.token_ids += output.token_ids
        if output.logprobs is not None:
            self.logprobs = [*(self.logprobs or ()), *output.logprobs]
        self.finish_reason, self.metrics, self.error = output.finish_reason, output.metrics, output.error
        self.num_prompt_tokens = output.num_prompt_tokens


@dataclass(frozen=True, slots=True)
class Generation:
    """All completions of one prompt; `text` and `token_ids` are those of the first."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[Completion]

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids


class LLM:
    """A model ready to generate.

    Args:
        model: directory, .gguf file, hub id, or "smollm2" (embedded).
        progress: told what is being loaded and how far that is, in [0, 1].
        options: fields of `EngineConfig`; ``speculative_config`` may be a dict. Without it the model's default
            drafter is used; ``speculative_config=None`` decodes plainly.

    Raises:
        ValueError: for settings that are unknown or do not fit, naming them.
    """

    def __init__(self, model: str, *, progress: Callable[[str, float], None] | None = None, **options: Any) -> None:
        if "speculative_config" not in options:
            options["speculative_config"] = default_speculation()
        self._start(EngineConfig.model_validate({"model": model, **options}), progress)

    @classmethod
    def from_config(cls, config: EngineConfig, progress: Callable[[str, float], None] | None = None) -> Self:
        """The same from settings that are complete."""
        llm = cls.__new__(cls)
        llm._start(config, progress)
        return llm

    def _start(self, config: EngineConfig, progress: Callable[[str, float], None] | None) -> None:
        self.engine = Engine(config, progress=progress)
        self._num_requests = 0

    @property
    def tokenizer(self) -> Any:
        return self.engine.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        show_progress: bool = False,
    ) -> list[Generation]:
        """Complete each prompt (text or token ids); results come in the order of the prompts.

        Args:
            params: one for all or one per prompt; default: the model's own settings.

        Raises:
            ValueError: for prompts or settings that can not be served.
            GenerationError: if a request failed in the engine.
        """
        return self._run([self._as_tokens(prompt) for prompt in _as_list(prompts)], params, show_progress)

    def chat(
        self,
        conversations: Conversation | Sequence[Conversation],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        show_progress: bool = False,
    ) -> list[Generation]:
        """The assistant's next turn in each conversation, a list of ``{"role": ..., "content": ...}``."""
        single = bool(conversations) and isinstance(conversations[0], Mapping)
        several: Sequence[Any] = [conversations] if single else conversations
        return self._run([(None, self.template(each)) for each in several], params, show_progress)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Generator[RequestOutput, None, None]:
        """Outputs of one prompt step by step; stopping early aborts it."""
        request_id = self._next_id()
        _, tokens = self._as_tokens(prompt)
        params = params if params is not None else self.default_params()
        self.engine.add_request(request_id, tokens, params)
        num_unfinished = params.n
        try:
            while num_unfinished:
                for output in self.engine.step():
                    num_unfinished -= output.finished
                    yield output
        finally:
            if num_unfinished:
                self.engine.abort(request_id)
                self.engine.step()

    def default_params(self, **changes: Any) -> SamplingParams:
        """What the model's generation_config.json asks for, and no limit but the context; with changes."""
        return SamplingParams(**{"max_tokens": None, **default_sampling(self.engine), **changes})

    def template(self, messages: Conversation) -> list[int]:
        """Token ids of a conversation, ready for the assistant's next turn."""
        return chat_token_ids(self.tokenizer, messages)

    def close(self) -> None:
        """Save what was learned while serving."""
        self.engine.close()

    def _as_tokens(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            return prompt, list(self.tokenizer(prompt).input_ids)
        return None, list(prompt)

    def _next_id(self) -> str:
        self._num_requests += 1
        return f"request-{self._num_requests}"

    def _run(
        self,
        prompts: Sequence[tuple[str | None, list[int]]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        show_progress: bool,
    ) -> list[Generation]:
        each = [params or self.default_params()] * len(prompts) if not isinstance(params, Sequence) else list(params)
        if len(each) != len(prompts):
            raise ValueError(f"got {len(prompts)} prompts and {len(each)} sampling params; give one, or one per prompt")
        results: dict[str, Generation] = {}
        try:
            for (text, tokens), own in zip(prompts, each, strict=True):
                request_id = self._next_id()
                self.engine.add_request(request_id, tokens, own)
                results[request_id] = Generation(text, tokens, [Completion(index) for index in range(own.n)])
            self._finish(results, show_progress)
        except BaseException:
            for request_id in results:
                self.engine.abort(request_id)
            while self.engine.has_unfinished:
                self.engine.step()
            raise
        return list(results.values())

    def _finish(self, results: Mapping[str, Generation], show_progress: bool) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, disable=not show_progress) as bar:
            task = bar.add_task("generating", total=sum(len(result.outputs) for result in results.values()))
            while self.engine.has_unfinished:
                for output in self.engine.step():
                    if output.request_id in results:
                        results[output.request_id].outputs[output.index].extend(output)
                        bar.advance(task, int(output.finished))
        for result in results.values():
            for completion in result.outputs:
                if completion.finish_reason == "error":
                    raise GenerationError(completion.error or "the request failed")


def default_speculation() -> SpeculativeConfig:
    """The speculative config where none was given: prompt lookup, which costs nothing to draft.

    The shipped DSpark drafter of SmolLM2 is not the default: at acceptance length 1.3 it does not yet pay for itself
    on a CPU (`benchmarks/results/default_drafter.json`).
    """
    return SpeculativeConfig.model_validate({"method": "ngram", "num_speculative_tokens": 4})


def default_sampling(engine: Engine) -> dict[str, Any]:
    """Sampling fields that the model's generation_config.json sets, under our names."""
    generation = getattr(engine.executor.loaded.model, "generation_config", None)
    own = generation.to_diff_dict() if generation is not None else {}
    names = ("repetition_penalty", "temperature", "top_k", "top_p", "min_p")
    defaults = {name: own[name] for name in names if own.get(name) is not None}
    if own.get("max_new_tokens") is not None:
        defaults["max_tokens"] = own["max_new_tokens"]
    return defaults


def chat_token_ids(tokenizer: Any, messages: Conversation, **options: Any) -> list[int]:
    """A conversation as the model's chat template writes it.

    Raises:
        ValueError: if the model has no chat template or its template refuses the conversation.
    """
    from jinja2 import TemplateError

    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("this model has no chat template; use completions, or add a chat_template to its tokenizer")
    try:
        encoded = tokenizer.apply_chat_template(
            list(messages), **{"add_generation_prompt": True, **options}, tokenize=True, return_dict=True
        )
    except (TemplateError, TypeError, KeyError) as error:
        raise ValueError(f"the model's chat template refuses these messages: {error}") from error
    return list(encoded["input_ids"])


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Any]:
    """Prompts one by one, where a text or a list of token ids is one prompt."""
    one = isinstance(prompts, str) or (bool(prompts) and all(isinstance(part, int) for part in prompts))
    return [prompts] if one else list(prompts)


__all__ = ["LLM", "Completion", "Generation", "GenerationError", "SamplingParams"]
