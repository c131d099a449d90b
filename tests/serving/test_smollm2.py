"""The main job on the real model, and every file in examples/."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serving.conftest import Server, running

pytestmark = pytest.mark.model
EXAMPLES = Path(__file__).parents[2] / "examples"
ON_THEIR_OWN = {"python_api.py"}


@pytest.fixture(scope="module")
def smollm2() -> Iterator[Server]:
    with running("smollm2", "--max-model-len", "2048") as server:
        yield server


def test_a_chat_request_is_answered_sensibly_with_speculation_on(smollm2: Server) -> None:
    reply = smollm2.client().chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": "What is the capital of France? Answer in one sentence."}],
        temperature=0,
        max_tokens=64,
    )
    assert "Paris" in (reply.choices[0].message.content or "")
    assert reply.choices[0].finish_reason == "stop"
    repeat = "Repeat this sentence three times: the quick brown fox jumps over the lazy dog."
    smollm2.client().chat.completions.create(
        model="smollm2", messages=[{"role": "user", "content": repeat}], temperature=0, max_tokens=64
    )
    assert smollm2.metric("vllm:spec_decode_num_draft_tokens_total") > 0
    assert smollm2.metric("vllm:spec_decode_num_accepted_tokens_total") > 0


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.iterdir()))
def test_example_runs(smollm2: Server, name: str) -> None:
    command = [sys.executable, str(EXAMPLES / name)] if name.endswith(".py") else [str(EXAMPLES / name)]
    environment = os.environ | {"TRIMTAB_URL": smollm2.url, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) > 50
