"""The command line as a user meets it: real processes, their output and exit codes."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.tiny import save_tiny_model
from trimtab.arguments import UsageError, add_engine_arguments, engine_config_from, normalize
from trimtab.cli import COMMANDS
from trimtab.engine.config import EngineConfig, SpeculativeConfig


def run(*words: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trimtab.cli", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **options)  # type: ignore[call-overload, no-any-return]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def parse(*words: str) -> EngineConfig:
    parser = argparse.ArgumentParser()
    add_engine_arguments(parser)
    return engine_config_from(parser.parse_args(normalize(["some/model", *words])))


def test_help_is_quick_and_names_every_command() -> None:
    runs = []
    for _ in range(3):
        start = time.perf_counter()
        done = run("--help")
        runs.append(time.perf_counter() - start)
    assert done.returncode == 0
    assert all(command in done.stdout for command in COMMANDS)
    assert min(runs) < 0.5


def test_help_imports_no_torch() -> None:
    code = "import sys, trimtab.cli; trimtab.cli.main(['--help']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("command", ["serve", "generate", "chat"])
def test_help_of_a_command_teaches_with_examples(command: str) -> None:
    done = run(command, "--help")
    assert done.returncode == 0, done.stderr
    assert f"trimtab {command} " in done.stdout
    assert "examples:" in done.stdout


@pytest.mark.parametrize("command", ["serve", "generate", "chat"])
def test_every_engine_setting_has_a_flag_with_help(command: str) -> None:
    text = run(command, "--help").stdout
    for name, field in EngineConfig.model_fields.items():
        assert name == "model" or f"--{name.replace('_', '-')}" in text
        assert field.description
    assert all(key in text.replace("\n", " ") for key in SpeculativeConfig.model_fields)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["srve"], "did you mean serve?"),
        (["--hlp"], "did you mean --help?"),
        (["serve", "m", "--max-model-lenght", "9"], "did you mean --max-model-len?"),
        (["serve", "m", "--prot", "9"], "did you mean --port?"),
        (["serve"], "MODEL"),
        (["serve", "m", "--max-num-seqs", "0"], "--max-num-seqs: input should be greater than or equal to 1"),
        (["serve", "m", "--port", "x"], "--port: "),
        (["serve", "m", "--dtype", "int7"], "int7"),
        (["serve", "m", "--speculative-config", "{"], "--speculative-config: not valid JSON"),
        (["serve", "m", "--speculative-config", "[]"], "give a JSON object"),
        (["serve", "m", "--speculative-config", '{"num_spec_tokens": 5}'], 'did you mean "num_speculative_tokens"?'),
        (["serve", "m", "--speculative-config.num_spec_tokens", "5"], 'did you mean "num_speculative_tokens"?'),
        (["serve", "m", "--speculative-config.num_speculative_tokens"], "needs a value"),
        (["serve", "m", "--no-speculation", "--speculative-config", "{}"], "contradict"),
        (["generate", "./no/such/model", "hi", "--no-speculation"], '"./no/such/model" does not exist'),
        (["generate", "m", ""], "prompt is empty"),
    ],
)
def test_a_mistake_is_one_line_that_says_what_to_do(words: list[str], told: str) -> None:
    done = run(*words)
    assert done.returncode == 2
    assert told in done.stderr
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("trimtab")]
    assert len(lines) == 1
    assert done.stdout == ""


def test_speculation_is_read_as_json_and_by_key() -> None:
    as_json = parse("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 5}')
    by_key = parse("--speculative-config.method", "ngram", "--speculative-config.num_speculative_tokens=5")
    mixed = parse("--speculative-config", '{"method": "ngram"}', "--speculative_config.num-speculative-tokens", "5")
    assert as_json.speculative_config == SpeculativeConfig(method="ngram", num_speculative_tokens=5)
    assert as_json == by_key == mixed


@pytest.mark.parametrize("words", [["--no-speculation"], ["--speculative-config", "none"]])
def test_speculation_can_be_turned_off(words: list[str]) -> None:
    assert parse(*words).speculative_config is None


def test_a_word_about_verification_keeps_the_default_drafter() -> None:
    chosen = parse("--speculative-config.enable_adaptive_verification", "false").speculative_config
    default = parse().speculative_config
    assert chosen is not None
    assert default is not None
    assert (chosen.method, chosen.num_speculative_tokens) == (default.method, default.num_speculative_tokens)
    assert not chosen.enable_adaptive_verification


def test_without_a_word_about_speculation_a_default_is_chosen() -> None:
    assert parse().speculative_config is not None


def test_flags_take_the_spellings_that_vllm_takes() -> None:
    config = parse("--max_model_len", "64", "--no-enable-prefix-caching", "--kv-cache-memory-gb=0.5", "--seed", "-3")
    assert (config.max_model_len, config.enable_prefix_caching) == (64, False)
    assert (config.kv_cache_memory_gb, config.seed) == (0.5, -3)


def test_values_of_dotted_keys_keep_dots_and_dashes() -> None:
    words = normalize(["--speculative-config.model", "./my-drafter_1.0", "--", "--max_model_len"])
    assert json.loads(words[-1].partition("=")[2]) == {"model": "./my-drafter_1.0"} or "--max_model_len" in words
    with pytest.raises(UsageError, match="needs a value"):
        normalize(["--speculative-config.model", "--port"])


def test_generate_streams_text_and_reports_the_drafts(tiny: str) -> None:
    words = ["generate", tiny, "w1 w2 w3", "--dtype", "float32", "--max-tokens", "40", "--speculative-config.method"]
    done = run(*words, "ngram", "--speculative-config.num_speculative_tokens", "3", "--temperature", "0")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()
    line = done.stderr.splitlines()[-1]
    for word in ("tokens/s", "acceptance length", "drafted", "verified", "accepted", "trimmed"):
        assert word in line
    plain = run(
        "generate",
        tiny,
        "w1 w2 w3",
        "--dtype",
        "float32",
        "--max-tokens",
        "40",
        "--no-speculation",
        "--temperature",
        "0",
    )
    assert plain.stdout == done.stdout
    assert "nothing drafted" in plain.stderr


def test_generate_reads_standard_input(tiny: str) -> None:
    flags = ["--dtype", "float32", "--max-tokens", "4", "--no-speculation", "--temperature", "0"]
    piped = run("generate", tiny, "-", *flags, input="w5 w6\n")
    assert piped.stdout == run("generate", tiny, "w5 w6", *flags).stdout


def test_chat_remembers_until_reset(tiny: str) -> None:
    flags = ["--dtype", "float32", "--max-tokens", "6", "--no-speculation", "--temperature", "0"]
    done = run("chat", tiny, *flags, input="w5 w6\nw5 w6\n/rest\n/reset\nw5 w6\n/exit\nw7\n")
    assert done.returncode == 0, done.stderr
    answers = done.stdout.splitlines()
    assert len(answers) == 3
    assert answers[0] == answers[2]
    assert "unknown command /rest" in done.stderr
    assert done.stderr.count("tokens/s") == 3


def test_a_bad_sampling_flag_is_named(tiny: str) -> None:
    done = run("generate", tiny, "w1", "--top-p", "3", "--no-speculation", "--dtype", "float32")
    assert done.returncode == 2
    assert "top_p must be above 0 and at most 1, got 3.0" in done.stderr


def test_a_prompt_longer_than_the_context_is_refused(tiny: str) -> None:
    done = run("generate", tiny, "w1 " * 300, "--no-speculation", "--dtype", "float32")
    assert done.returncode == 2
    assert "leaves no room for output" in done.stderr
    assert Path(tiny).name not in done.stdout
