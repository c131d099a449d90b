"""Token ids to text, a few at a time: characters of several tokens, and stop strings that lie across tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

REPLACEMENT = "\ufffd"  # what a decoder gives for bytes that are no character yet
NUM_CONTEXT_TOKENS = 5


class Detokenizer:
    """Text of one request's output.

    A token's text can depend on the one before it (leading spaces) and a character can take several tokens, so text is
    the difference between two decodings of a short window, and waits while that window ends inside a character.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int], stop: Sequence[str] = ()) -> None:
        self._decode = getattr(tokenizer, "_tokenizer", tokenizer).decode
        self._ids = list(prompt[-NUM_CONTEXT_TOKENS:])
        self._num_context = len(self._ids)  # tokens at the front of the window that are text already
        self._context = self._decode(self._ids, skip_special_tokens=True)
        self._stop = tuple(stop)
        self._held = ""  # text that may be the beginning of a stop string
        self._ready = ""
        self.stopped = False

    def push(self, token_ids: Sequence[int], num_exempt: int = 0) -> int:
        """Add tokens up to the one that completes a stop string, if any does.

        Args:
            num_exempt: stop strings do not end the output before more than so many of these tokens.

        Returns:
            How many of them belong to the output.
        """
        if not self._stop:
            self._ready += self._decoded(token_ids)
            return len(token_ids)
        for count, token in enumerate(token_ids, start=1):
            self._hold(self._decoded([token]), count > num_exempt)
            if self.stopped:
                return count
        return len(token_ids)

    def take(self, finished: bool = False) -> str:
        """Text that is certain since the last call; when finished, all that is left."""
        if finished and not self.stopped:
            text = self._decode(self._ids, skip_special_tokens=True)
            self._ready += self._held + text[len(self._context) :]
            self._held, self._context = "", text
        ready, self._ready = self._ready, ""
        return ready

    def _decoded(self, token_ids: Sequence[int]) -> str:
        self._ids.extend(token_ids)
        text: str = self._decode(self._ids, skip_special_tokens=True)
        if len(text) <= len(self._context) or text.endswith(REPLACEMENT):
            return ""
        new = text[len(self._context) :]
        del self._ids[: self._num_context]
        self._num_context = len(self._ids)
        self._context = self._decode(self._ids, skip_special_tokens=True)
        return new

    def _hold(self, new: str, check_stop: bool) -> None:
        text = self._held + new
        if check_stop:
            found = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
            if found:
                self._ready += text[: min(found)]
                self._held, self.stopped = "", True
                return
        keep = held_back(text, self._stop)
        self._ready += text[: len(text) - keep]
        self._held = text[len(text) - keep :]


def held_back(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of ``text`` that is a beginning of a stop string."""
    longest = max((len(stop) for stop in stops), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        end = text[-length:]
        if any(stop.startswith(end) for stop in stops):
            return length
    return 0
