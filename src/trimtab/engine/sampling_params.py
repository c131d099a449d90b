"""How one request wants its tokens drawn, under the names of vLLM and the OpenAI API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling settings of one request.

    Attributes:
        n: completions per prompt; the engine serves each as a request of its own.
        temperature: 0 is greedy.
        top_k: keep the k most likely tokens; 0 or -1: all.
        top_p: keep the smallest set of tokens with at least this mass.
        min_p: drop tokens less likely than this times the most likely one.
        repetition_penalty: above 1 discourages tokens of prompt and output.
        presence_penalty, frequency_penalty: OpenAI's, over output tokens.
        logit_bias: added to the logits of these token ids.
        min_tokens: no end-of-sequence or stop token before so many.
        max_tokens: None: up to the model's length.
        stop: strings that end the output; not part of it.
        stop_token_ids: tokens that end the output.
        seed: makes the output reproducible, alone or in any batch.
        logprobs: report the chosen token's log-probability and so many alternatives; None: none.

    Raises:
        ValueError: for a value out of range, naming the field.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    min_tokens: int = 0
    max_tokens: int | None = 16
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        """Refuse values that can not be served, and settle on one form of each."""
        _between("temperature", self.temperature, 0.0, 100.0)
        _between("top_p", self.top_p, 0.0, 1.0, exclude_low=True)
        _between("min_p", self.min_p, 0.0, 1.0)
        _between("repetition_penalty", self.repetition_penalty, 0.0, 10.0, exclude_low=True)
        _between("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _between("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _between("n", self.n, 1, 128)
        _between("min_tokens", self.min_tokens, 0, float("inf"))
        if self.top_k < -1:
            raise ValueError(f"top_k must be -1, 0 (off) or positive, got {self.top_k}")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}")
        if self.logprobs is not None:
            _between("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        if any(not isinstance(text, str) or not text for text in self.stop):
            raise ValueError(f"stop must hold non-empty strings, got {list(self.stop)}")
        if any(token < 0 for token in self.stop_token_ids):
            raise ValueError(f"stop_token_ids must not be negative, got {list(self.stop_token_ids)}")
        for token, bias in (self.logit_bias or {}).items():
            _between(f"logit_bias of token {token}", bias, -100.0, 100.0)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < 1e-5

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def alters_target(self) -> bool:
        """Whether the target's distribution is changed by something that a drafter does not see."""
        return self.has_penalties or bool(self.logit_bias) or self.min_tokens > 0


def _between(name: str, value: float, low: float, high: float, exclude_low: bool = False) -> None:
    if not low <= value <= high or (exclude_low and value == low):  # also refuses NaN
        edge = "above" if exclude_low else "at least"
        upper = "" if high == float("inf") else f" and at most {high:g}"
        raise ValueError(f"{name} must be {edge} {low:g}{upper}, got {value}")
