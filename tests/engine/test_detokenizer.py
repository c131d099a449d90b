"""Incremental text equals the text of the whole, and stop strings end it wherever they lie."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from trimtab.engine.detokenizer import Detokenizer, held_back


def byte_tokenizer() -> Any:
    """One token per byte: every character outside ASCII takes several."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


TOKENIZER = byte_tokenizer()


def encode(text: str) -> list[int]:
    return list(TOKENIZER.encode(text).ids)


@settings(max_examples=60, deadline=None)
@given(text=st.text(alphabet="aé日🎉 \n", max_size=30), prompt=st.text(alphabet="xü", max_size=6), seed=st.randoms())
def test_pieces_join_to_the_whole_text(text: str, prompt: str, seed: Any) -> None:
    detokenizer = Detokenizer(TOKENIZER, encode(prompt))
    ids, joined = encode(text), ""
    while ids:
        count = seed.randint(1, 4)
        assert detokenizer.push(ids[:count]) == len(ids[:count])
        piece = detokenizer.take()
        assert "\ufffd" not in piece
        joined += piece
        ids = ids[count:]
    assert joined + detokenizer.take(finished=True) == text


@settings(max_examples=100, deadline=None)
@given(text=st.text(alphabet="abé", max_size=24), stops=st.lists(st.text("abé", min_size=1, max_size=3), max_size=3))
def test_output_is_cut_before_the_first_stop_string_and_nothing_of_it_is_ever_shown(
    text: str, stops: list[str]
) -> None:
    detokenizer = Detokenizer(TOKENIZER, [], stops)
    shown, used = "", 0
    for token in encode(text):
        used += detokenizer.push([token])
        shown += detokenizer.take()
        if detokenizer.stopped:
            break
    shown += detokenizer.take(finished=True)
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    if not ends:
        assert shown == text
        return
    seen = text[: min(ends)]  # the text when the first stop string is complete
    assert shown == seen[: min(at for at in (seen.find(stop) for stop in stops) if at >= 0)]
    assert used == len(encode(seen))


def test_tokens_after_the_one_that_completes_a_stop_string_do_not_belong_to_the_output() -> None:
    detokenizer = Detokenizer(TOKENIZER, [], ["llo"])
    assert detokenizer.push(encode("hello world")) == 5
    assert detokenizer.take(finished=True) == "he"


def test_stop_strings_do_not_end_the_output_among_exempt_tokens() -> None:
    detokenizer = Detokenizer(TOKENIZER, [], ["b"])
    assert detokenizer.push(encode("abab"), num_exempt=3) == 4
    assert detokenizer.take(finished=True) == "aba"


@pytest.mark.parametrize(("text", "expected"), [("xaab", 3), ("xaa", 2), ("aac", 0), ("b", 0), ("", 0)])
def test_the_longest_beginning_of_a_stop_string_is_held_back(text: str, expected: int) -> None:
    assert held_back(text, ["aabb", "aa!"]) == expected
