"""The JSON that clients get, in OpenAI's shapes. Pure functions of what the engine said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from trimtab.engine.request import RequestMetrics, TokenLogprob

Kind = Literal["completion", "chat"]


@dataclass(frozen=True, slots=True)
class Reply:
    """The frame that all JSON of one reply shares.

    Attributes:
        tokenizer: gives tokens of logprobs their text.
    """

    kind: Kind
    reply_id: str
    created: int  # Unix seconds
    model: str
    tokenizer: Any
    text_lengths: dict[int, int] = field(default_factory=dict)  # by choice, for the text offsets of logprobs

    def whole(self, choices: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        """A reply that is not streamed."""
        name = "chat.completion" if self.kind == "chat" else "text_completion"
        return self._frame(name, choices) | {"usage": usage}

    def chunk(self, choices: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        """One event of a stream."""
        name = "chat.completion.chunk" if self.kind == "chat" else "text_completion"
        return self._frame(name, choices) | fields

    def _frame(self, name: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.reply_id,
            "object": name,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": None,
            "choices": choices,
        }

    def choice(
        self, index: int, text: str, logprobs: Sequence[TokenLogprob] | None, finish_reason: str | None
    ) -> dict[str, Any]:
        """A finished choice."""
        content: dict[str, Any] = {"text": text}
        if self.kind == "chat":
            content = {"message": {"role": "assistant", "content": text, "refusal": None}}
        return {"index": index, **content, "logprobs": self._logprobs(index, logprobs), "finish_reason": finish_reason}

    def delta(
        self,
        index: int,
        text: str | None = None,
        logprobs: Sequence[TokenLogprob] | None = None,
        finish_reason: str | None = None,
        role: str | None = None,
    ) -> dict[str, Any]:
        """What one event adds to a choice."""
        content: dict[str, Any] = {"text": text or ""}
        if self.kind == "chat":
            content = {"delta": ({"role": role} if role else {}) | ({} if text is None else {"content": text})}
        return {"index": index, **content, "logprobs": self._logprobs(index, logprobs), "finish_reason": finish_reason}

    def _logprobs(self, index: int, logprobs: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
        if logprobs is None:
            return None
        if self.kind == "chat":
            return {"content": [self._chat_logprob(each) for each in logprobs], "refusal": None}
        tokens = [self._text(each.token_id) for each in logprobs]
        offsets, position = [], self.text_lengths.get(index, 0)
        for token in tokens:
            offsets.append(position)
            position += len(token)
        self.text_lengths[index] = position
        return {
            "tokens": tokens,
            "token_logprobs": [_finite(each.logprob) for each in logprobs],
            "top_logprobs": [{self._text(i): _finite(value) for i, value in _with_chosen(each)} for each in logprobs],
            "text_offset": offsets,
        }

    def _chat_logprob(self, logprob: TokenLogprob) -> dict[str, Any]:
        top = [self._token(token_id, value) for token_id, value in logprob.top]
        return self._token(logprob.token_id, logprob.logprob) | {"top_logprobs": top}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self._text(token_id)
        return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode("utf-8", errors="replace"))}

    def _text(self, token_id: int) -> str:
        text: str = self.tokenizer.decode([token_id])
        return text


def _with_chosen(logprob: TokenLogprob) -> list[tuple[int, float]]:
    """OpenAI's completions list the chosen token among the alternatives even if it is not one of the likeliest."""
    chosen = (logprob.token_id, logprob.logprob)
    known = any(token_id == logprob.token_id for token_id, _ in logprob.top)
    return [*logprob.top] if known else [*logprob.top, chosen]


def _finite(logprob: float) -> float:
    """JSON has no infinities; the OpenAI API gives -9999 for impossible tokens."""
    return max(logprob, -9999.0)


def usage_fields(num_prompt: int, num_completion: int, num_cached: int) -> dict[str, Any]:
    """Token counts; a prompt counts once, however many completions it has."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


def speculation_fields(metrics: RequestMetrics, num_positions: int, detailed: bool) -> dict[str, Any]:
    """``metrics.speculative_decoding`` as vLLM writes and AIPerf reads it.

    Draft tokens are those that were verified, so that rates mean what they mean where nothing is trimmed; how many were
    drafted is added under a name of its own. AIPerf wants numbers where nothing was drafted, and a histogram of exactly
    ``num_positions + 1`` counts.
    """
    by_length: dict[int, dict[int, int]] = {}
    for (verified, accepted), count in metrics.accepted_by_verified.items():
        by_length.setdefault(verified, {})[accepted] = count
    steps, accepted, verified = metrics.num_spec_steps, metrics.num_accepted, metrics.num_verified
    fields: dict[str, Any] = {
        "mean_acceptance_length": 1.0 + accepted / steps if steps else 1.0,
        "draft_acceptance_rate": accepted / verified if verified else 0.0,
        "acceptance_histogram": _dense(metrics.accepted_histogram, num_positions),
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": verified,
        "num_spec_tokens": num_positions,
        "num_drafted_tokens": metrics.num_drafted,
    }
    if detailed:
        fields["acceptance_histogram_by_draft_length"] = {
            str(length): _dense(row, length) for length, row in sorted(by_length.items())
        }
    return {"speculative_decoding": fields}


def _dense(counts: Mapping[int, int], most: int) -> list[int]:
    return [counts.get(number, 0) for number in range(most + 1)]
