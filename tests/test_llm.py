"""The Python API against the engine underneath it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.tiny import save_tiny_model
from trimtab import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("llm"))


@pytest.fixture(scope="module")
def llm(tiny: str) -> Iterator[LLM]:
    llm = LLM(tiny, dtype="float32", speculative_config=NGRAM, max_num_seqs=4)
    yield llm
    llm.close()


def test_results_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [f"w{i} w{i + 1}" for i in range(9)]
    together = llm.generate(prompts, [SamplingParams(temperature=0, max_tokens=3 + i) for i in range(9)])
    assert [result.prompt for result in together] == prompts
    for i, result in enumerate(together):
        alone = llm.generate(prompts[i], SamplingParams(temperature=0, max_tokens=3 + i))[0]
        assert result.token_ids == alone.token_ids
        assert result.text == alone.text


def test_token_ids_and_text_are_the_same_prompt(llm: LLM) -> None:
    ids = llm.tokenizer("w3 w4").input_ids
    assert llm.generate([ids], GREEDY)[0].token_ids == llm.generate("w3 w4", GREEDY)[0].token_ids


def test_several_completions_of_one_prompt_differ(llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=1.0, max_tokens=8, seed=1, ignore_eos=True)
    outputs = llm.generate("w3", params)[0].outputs
    assert [completion.index for completion in outputs] == [0, 1, 2]
    assert len({tuple(completion.token_ids) for completion in outputs}) == 3
    assert [c.token_ids for c in llm.generate("w3", params)[0].outputs] == [c.token_ids for c in outputs]


def test_chat_uses_the_template(llm: LLM) -> None:
    by_chat = llm.chat([{"role": "user", "content": "w5 w6"}], GREEDY)[0]
    assert by_chat.token_ids == llm.generate("w1 w5 w6 w2", GREEDY)[0].token_ids
    several = llm.chat([[{"role": "user", "content": "w5 w6"}], [{"role": "user", "content": "w7"}]], GREEDY)
    assert several[0].token_ids == by_chat.token_ids


def test_a_stream_adds_up_and_may_be_left(llm: LLM) -> None:
    whole = llm.generate("w3 w4", GREEDY)[0]
    assert "".join(output.text for output in llm.stream("w3 w4", GREEDY)) == whole.text
    for _ in llm.stream("w3 w4", GREEDY):
        break
    assert not llm.engine.has_unfinished
    assert llm.engine.stats().kv_usage == 0


def test_a_prompt_that_is_refused_leaves_nothing_behind(llm: LLM) -> None:
    with pytest.raises(ValueError, match="no room for output"):
        llm.generate(["w3", "w3 " * 400], GREEDY)
    assert not llm.engine.has_unfinished
    with pytest.raises(ValueError, match="2 prompts and 1 sampling params"):
        llm.generate(["w3", "w4"], [GREEDY])


def test_a_misspelt_setting_is_named(tiny: str) -> None:
    with pytest.raises(ValueError, match='did you mean "max_num_seqs"'):
        LLM(tiny, max_num_seq=3)
    with pytest.raises(ValueError, match='did you mean "num_speculative_tokens"'):
        LLM(tiny, speculative_config={"num_spec_tokens": 3})
