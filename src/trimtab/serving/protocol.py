"""What clients may send: OpenAI's request fields, and vLLM's additions. A field is served or refused, never ignored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, WrapValidator, model_validator
from pydantic_core import PydanticCustomError

from trimtab.engine.sampling_params import MAX_LOGPROBS, SamplingParams
from trimtab.serving.errors import suggestion

INT64 = 2**63
TokenId = Annotated[int, Field(ge=0, lt=INT64)]
KeyedTokenId = Annotated[int, Field(ge=0, lt=INT64, strict=False)]  # JSON objects have texts as keys
StopString = Annotated[str, Field(min_length=1, max_length=1000)]


def _one_of(message: str) -> WrapValidator:
    """What to say when none of a union's forms fits, instead of one complaint per form."""

    def validate(value: Any, handler: Callable[[Any], Any]) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise PydanticCustomError("no_form_fits", "{message}", {"message": message}) from None

    return WrapValidator(validate)


# One complaint about a list is enough: a hundred thousand of them would keep the event loop busy for seconds.
Many = Field(fail_fast=True)
TokenIds = Annotated[list[TokenId], Many]
Prompts = Annotated[
    str | TokenIds | Annotated[list[str], Many] | Annotated[list[TokenIds], Many],
    _one_of("must be a string, a list of strings, a list of token ids, or a list of lists of token ids"),
]
Stop = Annotated[
    StopString | Annotated[list[StopString], Field(max_length=64), Many],
    _one_of("must be a string or a list of at most 64 strings, each of 1 to 1000 characters"),
]

# Fields of the OpenAI API that change the answer in ways we do not offer, with the value that asks for nothing.
REFUSED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "function_call": ("none",),
    "functions": ([],),
    "guided_json": (),
    "guided_regex": (),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "use_beam_search": (False,),
    "web_search_options": (),
}

SAMPLING_FIELDS = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "seed",
)


class Body(BaseModel):
    """A JSON object without unknown fields."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=())
    drops_refused: ClassVar[bool] = False

    @model_validator(mode="before")
    @classmethod
    def _known_fields_only(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        kept = {}
        for name, value in values.items():
            if name in cls.model_fields:
                kept[name] = value
            elif not cls.drops_refused or name not in REFUSED:
                hint = suggestion(str(name), cls.model_fields)
                raise _complaint(name, f"unknown field{hint}")
            elif value is not None and value not in REFUSED[name]:
                raise _complaint(name, "this field is not supported by this server; leave it out")
        return kept


def _complaint(name: str, message: str) -> PydanticCustomError:
    return PydanticCustomError("refused_field", "{param}: {reason}", {"param": _printable(name), "reason": message})


def _printable(name: object) -> str:
    return str(name)[:100].encode("ascii", "backslashreplace").decode()


class StreamOptions(Body):
    include_usage: bool = False


class GenerationRequest(Body):
    """Fields that completions and chat completions share; None takes the model's own default."""

    drops_refused = True

    model: str | None = Field(None, description="a served model name; may be left out")
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=128)
    max_tokens: int | None = Field(None, ge=1, lt=INT64)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=INT64)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=10)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[KeyedTokenId, Annotated[float, Field(ge=-100, le=100)]] | None = Field(None, max_length=1024)
    stop: Stop | None = None
    stop_token_ids: list[TokenId] | None = Field(None, max_length=1024)
    ignore_eos: bool | None = None
    min_tokens: int | None = Field(None, ge=0, lt=INT64)
    seed: int | None = Field(None, ge=-INT64, lt=INT64)
    user: str | None = Field(None, max_length=512, description="written to the request log")
    include_metrics: bool = Field(False, description="add metrics.speculative_decoding to the response")

    @model_validator(mode="after")
    def _options_of_streams(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise _complaint("stream_options", "only allowed with stream: true")
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def length_limit(self) -> int | None:
        return self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives to report per token; None reports nothing."""
        return None

    def sampling_params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """Sampling settings: what was sent, else what the model's generation_config.json says.

        Raises:
            ValueError: if the fields contradict each other, naming them.
        """
        sent = {name: value for name in SAMPLING_FIELDS if (value := getattr(self, name)) is not None}
        if self.stop is not None:
            sent["stop"] = [self.stop] if isinstance(self.stop, str) else self.stop
        limit = self.length_limit
        sent["max_tokens"] = limit if limit is not None else defaults.get("max_tokens")
        return SamplingParams(**{**defaults, **sent, "logprobs": self.num_logprobs})


class CompletionRequest(GenerationRequest):
    """Body of POST /v1/completions."""

    prompt: Prompts = Field(description="text, token ids, or lists of them")
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @model_validator(mode="after")
    def _echo_without_logprobs(self) -> Self:
        if self.echo and self.logprobs is not None:
            raise _complaint("echo", "not supported together with logprobs; prompts are not scored")
        return self

    @property
    def length_limit(self) -> int | None:
        return 16 if self.max_tokens is None else self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    def prompts(self) -> list[str | list[int]]:
        """One entry per prompt."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and all(isinstance(part, int) for part in self.prompt):
            return [list(self.prompt)]  # type: ignore[arg-type]
        return list(self.prompt)  # type: ignore[arg-type]


class TextPart(Body):
    type: Literal["text"]
    text: str


class Message(Body):
    """One turn of a conversation, in text only."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        str | Annotated[list[TextPart], Many],
        _one_of('only text is supported: a string or a list of {"type": "text"} parts'),
    ]
    name: str | None = None

    def as_template_input(self) -> dict[str, str]:
        content = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": content} | ({"name": self.name} if self.name else {})


class ChatCompletionRequest(GenerationRequest):
    """Body of POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1, max_length=4096)
    max_completion_tokens: int | None = Field(None, ge=1, lt=INT64)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, bool | int | float | str | None] | None = Field(None, max_length=32)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise _complaint("top_logprobs", "only allowed with logprobs: true")
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise _complaint("max_tokens", "contradicts max_completion_tokens; send one of them")
        if (
            self.continue_final_message
            and self.add_generation_prompt
            and "add_generation_prompt" in self.model_fields_set
        ):
            raise _complaint("continue_final_message", "contradicts add_generation_prompt: true")
        taken = {
            "chat_template",
            "tokenize",
            "messages",
            "conversation",
            "tools",
            "return_dict",
            "padding",
            "truncation",
        }
        if taken & set(self.chat_template_kwargs or {}):
            raise _complaint("chat_template_kwargs", f"may not set {', '.join(sorted(taken))}")
        return self

    @property
    def length_limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None
