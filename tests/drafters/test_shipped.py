"""The drafter that ships drafts for the embedded model, and the target accepts some of it."""

from __future__ import annotations

import pytest

from trimtab import LLM, SamplingParams
from trimtab.drafters import check_drafter


@pytest.mark.model
@pytest.mark.slow
def test_the_shipped_dspark_drafter_drafts_for_the_embedded_model() -> None:
    options = {"max_model_len": 512, "kv_cache_memory_gb": 0.2, "dtype": "float32"}
    # Untrimmed: what adaptive verification skips depends on how fast this machine is.
    speculation = {"method": "dspark", "enable_adaptive_verification": False}
    llm = LLM("smollm2", speculative_config=speculation, **options)
    question = [{"role": "user", "content": "Janet has 3 apples and buys 4 more. How many apples has she now?"}]
    llm.chat(question, SamplingParams(temperature=0, max_tokens=64, ignore_eos=True))
    stats = llm.engine.stats()
    assert stats.num_verified > 50
    assert stats.num_accepted > 0.03 * stats.num_verified
    assert not stats.fallbacks_by_reason
    assert llm.engine.speculation is not None
    check_drafter(llm.engine.speculation.drafter, llm.engine.executor)
