"""``trimtab generate`` and ``trimtab chat``: one model, one reader, in the terminal."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from trimtab.arguments import UsageError, add_engine_arguments, engine_config_from

if TYPE_CHECKING:
    from trimtab.engine.config import EngineConfig
    from trimtab.engine.request import RequestOutput
    from trimtab.engine.sampling_params import SamplingParams
    from trimtab.llm import LLM

SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop")
GENERATE_EXAMPLES = """examples:
  trimtab generate smollm2 "Why is the sky blue?"
  trimtab generate smollm2 --raw "Once upon a time" --max-tokens 64 --temperature 0.8
  trimtab generate smollm2 --speculative-config '{"method": "ngram", "num_speculative_tokens": 6}' "..."
  echo "Name three rivers." | trimtab generate smollm2 -
The same flags and --seed give the same text."""
CHAT_EXAMPLES = """examples:
  trimtab chat smollm2
  trimtab chat smollm2 --system "You answer in one sentence."
In the conversation: /reset forgets it, /exit (or Ctrl-D) ends it, Ctrl-C stops an answer."""


def add_parser(subparsers: Any) -> None:
    """Register both commands."""
    generate = subparsers.add_parser(
        "generate", description="Complete one prompt and say how the drafts fared.", epilog=GENERATE_EXAMPLES
    )
    add_engine_arguments(generate)
    generate.add_argument("prompt", metavar="PROMPT", help='what to answer; "-" reads it from standard input')
    generate.add_argument("--raw", action="store_true", help="continue the text as it is, without the chat template")
    _add_sampling(generate)
    generate.set_defaults(run=_generate)
    chat = subparsers.add_parser("chat", description="Talk to a model.", epilog=CHAT_EXAMPLES)
    add_engine_arguments(chat)
    chat.add_argument("--system", metavar="TEXT", help="instructions that come before the conversation")
    _add_sampling(chat)
    chat.set_defaults(run=_chat)


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling", "Defaults come from the model's generation_config.json.")
    group.add_argument("--max-tokens", type=int, metavar="N", help="longest answer (default: up to the context)")
    group.add_argument("--temperature", type=float, metavar="T", help="0 is greedy")
    group.add_argument("--top-p", type=float, metavar="P", help="draw from the most likely tokens of this mass")
    group.add_argument("--top-k", type=int, metavar="K", help="draw from the K most likely tokens")
    group.add_argument("--min-p", type=float, metavar="P", help="drop tokens less likely than P times the best")
    group.add_argument("--repetition-penalty", type=float, metavar="X", help="above 1 discourages repetition")
    group.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be repeated")


@contextmanager
def loading(name: str) -> Iterator[Callable[[str, float], None]]:
    """A progress bar on standard error while a model loads; plain lines where that is no terminal."""
    if not sys.stderr.isatty():
        yield lambda message, _fraction: print(f"{name}: {message}", file=sys.stderr, flush=True)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("[bold]{task.fields[model]}"), BarColumn(), TextColumn("{task.description}"))
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=1.0, model=name)
        yield lambda message, fraction: bar.update(task, description=message, completed=fraction)


def load(config: EngineConfig) -> LLM:
    """A model with progress shown.

    Raises:
        UsageError: if it can not be loaded or does not fit its settings.
    """
    from trimtab.llm import LLM

    with loading(config.model) as progress:
        try:
            return LLM.from_config(config, progress)
        except (ValueError, OSError) as error:
            raise UsageError(str(error).strip().split("\n")[0]) from error


def _params(llm: LLM, arguments: argparse.Namespace) -> SamplingParams:
    given = {name: value for name in SAMPLING if (value := getattr(arguments, name)) is not None}
    try:
        return llm.default_params(**given)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _generate(arguments: argparse.Namespace) -> int:
    config = engine_config_from(arguments)
    prompt = sys.stdin.read().strip() if arguments.prompt == "-" else arguments.prompt
    if not prompt:
        raise UsageError("the prompt is empty; give at least one word")
    llm = load(config)
    params = _params(llm, arguments)
    templated = not arguments.raw and getattr(llm.tokenizer, "chat_template", None)
    try:
        _answer(llm, _chat_ids(llm, [{"role": "user", "content": prompt}]) if templated else prompt, params)
    finally:
        llm.close()
    return 0


def _chat_ids(llm: LLM, messages: Sequence[dict[str, str]]) -> list[int]:
    from trimtab.llm import chat_token_ids

    try:
        return chat_token_ids(llm.tokenizer, messages)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _answer(llm: LLM, prompt: str | list[int], params: SamplingParams) -> str:
    """Stream one answer and the line about it; returns the text."""
    start = time.monotonic()
    text: list[str] = []
    num_tokens, last = 0, None
    try:
        for last in llm.stream(prompt, params):
            num_tokens += len(last.token_ids)
            text.append(last.text)
            print(last.text, end="", flush=True)
    except ValueError as error:
        raise UsageError(str(error)) from error
    finally:
        print(flush=True)
    if last is not None and last.finish_reason == "error":
        raise UsageError(f"the model failed on this prompt: {last.error}")
    if last is not None:
        _print_dim(summary(last, num_tokens, time.monotonic() - start), sys.stderr)
    return "".join(text)


def summary(last: RequestOutput, num_tokens: int, seconds: float) -> str:
    """How fast an answer came, and what became of its drafts.

    Args:
        last: the answer's last output.
        seconds: from the request to its end; the rate is over this, prompt included.
    """
    metrics = last.metrics
    line = f"{num_tokens} tokens, {num_tokens / seconds:.1f} tokens/s"
    if metrics.first_token is not None:
        line += f", first after {metrics.first_token - metrics.arrival:.2f} s"
    if not metrics.num_drafted:
        return f"{line}; nothing drafted"
    trimmed = 1 - metrics.num_verified / metrics.num_drafted
    return (
        f"{line}; acceptance length {metrics.acceptance_length:.2f}, drafted {metrics.num_drafted}, "
        f"verified {metrics.num_verified}, accepted {metrics.num_accepted}, trimmed {trimmed:.0%}"
    )


def _print_dim(line: str, stream: TextIO) -> None:
    print(f"\x1b[2m{line}\x1b[0m" if stream.isatty() else line, file=stream, flush=True)


def _chat(arguments: argparse.Namespace) -> int:
    llm = load(engine_config_from(arguments))
    params = _params(llm, arguments)
    start = [{"role": "system", "content": arguments.system}] if arguments.system else []
    messages = list(start)
    _print_dim("/reset forgets the conversation, /exit ends it", sys.stderr)
    try:
        for line in _lines():
            if line == "/exit":
                break
            if line == "/reset":
                messages = list(start)
            elif line.startswith("/"):
                print(f"unknown command {line}; there are /reset and /exit", file=sys.stderr)
            elif line:
                messages = _turn(llm, params, messages, line)
    finally:
        llm.close()
    return 0


def _lines() -> Iterator[str]:
    if sys.stdin.isatty():
        import readline  # noqa: F401  (arrow keys and history in input())
    while True:
        try:
            yield input("> " if sys.stdin.isatty() else "").strip()
        except (EOFError, KeyboardInterrupt):
            return


def _turn(llm: LLM, params: SamplingParams, messages: list[dict[str, str]], line: str) -> list[dict[str, str]]:
    """The conversation after one more question; unchanged if there was no answer."""
    asked = [*messages, {"role": "user", "content": line}]
    try:
        return [*asked, {"role": "assistant", "content": _answer(llm, _chat_ids(llm, asked), params)}]
    except KeyboardInterrupt:
        _print_dim("stopped", sys.stderr)
    except UsageError as error:
        print(f"{error} (/reset begins anew)", file=sys.stderr)
    return messages
