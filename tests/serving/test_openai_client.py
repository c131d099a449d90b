"""The official client against the real server."""

from __future__ import annotations

import math

import openai
import pytest

from tests.serving.conftest import Server

PROMPT = "w3 w4 w5 w6"


def complete(client: openai.OpenAI, **options: object) -> openai.types.Completion:
    return client.completions.create(**{"model": "tiny", "prompt": PROMPT, "temperature": 0, **options})  # type: ignore[call-overload,no-any-return]


def test_completion_has_text_usage_and_a_reason(client: openai.OpenAI) -> None:
    reply = complete(client, max_tokens=12, extra_body={"ignore_eos": True})
    assert reply.object == "text_completion"
    assert reply.id.startswith("cmpl-")
    assert reply.choices[0].finish_reason == "length"
    assert len(reply.choices[0].text.split()) == 12
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.total_tokens) == (4, 12, 16)


def test_default_length_of_completions_is_sixteen(client: openai.OpenAI) -> None:
    reply = complete(client, extra_body={"ignore_eos": True})
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 16


def test_streamed_completion_equals_the_whole_one(client: openai.OpenAI) -> None:
    whole = complete(client, max_tokens=40)
    chunks = list(complete(client, max_tokens=40, stream=True))  # type: ignore[call-overload]
    assert len(chunks) > 2
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_chat_and_its_stream_agree(client: openai.OpenAI) -> None:
    options = {
        "model": "tiny",
        "messages": [
            {"role": "system", "content": "w9"},
            {"role": "user", "content": [{"type": "text", "text": "w3 w4"}]},
        ],
        "temperature": 0,
        "max_tokens": 20,
    }
    whole = client.chat.completions.create(**options)  # type: ignore[call-overload]
    assert whole.object == "chat.completion"
    assert whole.choices[0].message.role == "assistant"
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))  # type: ignore[call-overload]
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        == whole.choices[0].message.content
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage


def test_prompts_may_be_texts_ids_or_lists_of_either(client: openai.OpenAI) -> None:
    text = complete(client).choices[0].text
    ids = complete(client, prompt=[6 + 1, 8, 9, 10]).choices[0].text
    assert ids == text  # the tokenizer gives word w<i> the id i + 4
    for prompts in ([PROMPT, "w1 w2"], [[7, 8, 9, 10], [5, 6]]):
        several = complete(client, prompt=prompts)
        assert [choice.index for choice in several.choices] == [0, 1]
        assert several.choices[0].text == text
        assert several.choices[1].text != text
        assert several.usage is not None
        assert several.usage.prompt_tokens == 6


def test_n_counts_the_prompt_once_and_gives_different_outputs(client: openai.OpenAI) -> None:
    reply = complete(client, n=3, temperature=1.0, seed=5, max_tokens=8, extra_body={"ignore_eos": True})
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    assert len({choice.text for choice in reply.choices}) > 1
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (4, 24)
    streamed = complete(
        client, n=3, temperature=1.0, seed=5, max_tokens=8, stream=True, extra_body={"ignore_eos": True}
    )
    texts = ["", "", ""]
    for chunk in streamed:  # type: ignore[attr-defined]
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in reply.choices]


def test_a_seed_repeats_and_another_does_not(client: openai.OpenAI) -> None:
    first, again, other = (complete(client, temperature=1.5, max_tokens=24, seed=seed) for seed in (7, 7, 8))
    assert first.choices[0].text == again.choices[0].text
    assert first.choices[0].text != other.choices[0].text


def test_stop_strings_and_ids_end_the_output_before_them(client: openai.OpenAI) -> None:
    words = complete(client, max_tokens=20, extra_body={"ignore_eos": True}).choices[0].text.split()
    stop = next(word for i, word in enumerate(words) if i >= 4 and word not in words[:i])
    expected = words[: words.index(stop)]
    by_text = complete(client, max_tokens=20, stop=[f"{stop} "], extra_body={"ignore_eos": True})
    assert by_text.choices[0].text.split() == expected
    assert by_text.choices[0].finish_reason == "stop"
    by_id = complete(client, max_tokens=20, extra_body={"ignore_eos": True, "stop_token_ids": [int(stop[1:]) + 4]})
    assert by_id.choices[0].text.split() == expected
    assert by_id.choices[0].finish_reason == "stop"


def test_completion_logprobs_belong_to_the_tokens(client: openai.OpenAI) -> None:
    reply = complete(client, max_tokens=6, logprobs=3, extra_body={"ignore_eos": True})
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.tokens == reply.choices[0].text.split()
    assert logprobs.token_logprobs is not None
    assert logprobs.top_logprobs is not None
    for token, value, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert top[token] == value == max(top.values())  # greedy
        assert len(top) == 3
        assert sum(math.exp(each) for each in top.values()) <= 1 + 1e-5


@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs(client: openai.OpenAI, stream: bool) -> None:
    reply = client.chat.completions.create(  # type: ignore[call-overload]
        model="tiny",
        messages=[{"role": "user", "content": "w3"}],
        max_completion_tokens=5,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
        stream=stream,
        extra_body={"ignore_eos": True},
    )
    choices = [chunk.choices[0] for chunk in reply] if stream else [reply.choices[0]]
    content = [token for choice in choices if choice.logprobs for token in choice.logprobs.content]
    assert len(content) == 5
    assert all(token.top_logprobs[0].token == token.token for token in content)
    assert all(bytes(token.bytes).decode() == token.token for token in content)


def test_sampling_fields_reach_the_engine(client: openai.OpenAI) -> None:
    plain = complete(client, max_tokens=12, extra_body={"ignore_eos": True}).choices[0].text
    biased = complete(client, max_tokens=4, logit_bias={"20": 100}, extra_body={"ignore_eos": True}).choices[0].text
    assert biased.split() == ["w16"] * 4
    one = complete(client, temperature=1.7, max_tokens=12, extra_body={"top_k": 1, "ignore_eos": True}).choices[0].text
    assert one == plain
    likely = complete(client, temperature=1.7, max_tokens=12, extra_body={"min_p": 1.0, "ignore_eos": True})
    assert likely.choices[0].text == plain
    nucleus = complete(client, temperature=1.7, top_p=1e-6, max_tokens=12, extra_body={"ignore_eos": True})
    assert nucleus.choices[0].text == plain
    penalties = {"presence_penalty": 2.0, "frequency_penalty": 2.0}
    body = {"ignore_eos": True, "repetition_penalty": 9.0}
    penalized = complete(client, max_tokens=30, **penalties, extra_body=body).choices[0].text.split()
    repeats = complete(client, max_tokens=30, extra_body={"ignore_eos": True}).choices[0].text.split()
    assert len(set(penalized)) > len(set(repeats)) or len(set(repeats)) == 30


def test_echo_puts_the_prompt_first(client: openai.OpenAI) -> None:
    text = complete(client).choices[0].text
    assert complete(client, echo=True).choices[0].text == PROMPT + text
    streamed = complete(client, echo=True, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == PROMPT + text  # type: ignore[attr-defined]


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_errors_are_the_clients_own_classes(client: openai.OpenAI, server: Server) -> None:
    with pytest.raises(openai.NotFoundError, match='"other" is not served here'):
        complete(client, model="other")
    with pytest.raises(openai.BadRequestError, match="temperature") as refusal:
        complete(client, temperature=-1)
    assert refusal.value.param == "temperature"
    assert refusal.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError, match="leaves no room"):
        complete(client, prompt="w1 " * 300)
    with pytest.raises(openai.BadRequestError, match="holds token id 64"):
        complete(client, prompt=[64])
    with pytest.raises(openai.BadRequestError, match="no tokens"):
        complete(client, prompt="")
