"""The ``trimtab`` command. Flags come from the config classes; torch is imported only when a model is needed."""

from __future__ import annotations

import argparse
import difflib
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError

from trimtab import __version__
from trimtab.engine.config import EngineConfig, SpeculativeConfig

if TYPE_CHECKING:
    from trimtab.engine.request import RequestMetrics
    from trimtab.llm import LLM

M = TypeVar("M", bound=BaseModel)
SPECULATIVE = "--speculative-config"
MORE_COMMANDS = ("trimtab.training.cli", "trimtab.evaluation.cli")

OVERVIEW = """\
commands to start with:
  trimtab serve smollm2                        an OpenAI-compatible server on port 8000
  trimtab generate smollm2 "The sea is"        one completion, and what speculation did for it
  trimtab chat smollm2                         talk to a model

A model is a directory, a .gguf file, a Hugging Face hub id, or smollm2 (comes with the setup).
"""
SERVE_EXAMPLES = """\
examples:
  trimtab serve smollm2
  trimtab serve Qwen/Qwen3-0.6B --dtype bfloat16 --max-model-len 8192 --api-key secret
  trimtab serve TARGET --speculative-config '{"method": "eagle3", "model": "DRAFTER", "num_speculative_tokens": 5}'
  trimtab serve TARGET --speculative-config.method ngram --speculative-config.num_speculative_tokens=4
  trimtab serve smollm2 --no-speculation

Without --speculative-config the model's own drafter is used if there is one, else prompt lookup (ngram).
"""
GENERATE_EXAMPLES = """\
examples:
  trimtab generate smollm2 "Once upon a time"
  trimtab generate smollm2 --chat "Why is the sky blue?" --max-tokens 200 --temperature 0
  echo "A long prompt" | trimtab generate smollm2 -
"""


class UsageError(Exception):
    """The command can not run as it was typed; the message is one line and names the remedy."""


class Parser(argparse.ArgumentParser):
    """One clear line per mistake, and no abbreviations: a flag means what it says."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        settings = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False} | kwargs
        super().__init__(*args, **settings)

    def error(self, message: str) -> NoReturn:
        invalid = message.partition("invalid choice: ")[2].partition(" ")[0].strip("'")
        if invalid:
            commands = [name for action in self._actions for name in action.choices or ()]
            message = f'unknown command "{invalid}"{_suggestion(invalid, commands)}'
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 2 for a command that can not run as typed."""
    words, speculative = _take_dotted(_dashes(sys.argv[1:] if argv is None else argv))
    parser = build_parser()
    try:
        args, unknown = parser.parse_known_args(words)
        if unknown:
            _refuse(args.parser, unknown)
        args.dotted = speculative
        return int(args.run(args))
    except UsageError as error:
        print(f"trimtab: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def build_parser() -> argparse.ArgumentParser:
    """All commands; those of parts that are not installed are left out."""
    from trimtab.serving.config import ServerConfig

    parser = Parser(prog="trimtab", description="Adaptive speculative decoding.", epilog=OVERVIEW)
    parser.add_argument("--version", action="version", version=f"trimtab {__version__}")
    parser.set_defaults(run=run_help, parser=parser)
    commands = parser.add_subparsers(metavar="COMMAND", parser_class=Parser)

    serve = commands.add_parser("serve", help="start an OpenAI-compatible server", epilog=SERVE_EXAMPLES)
    serve.set_defaults(run=run_serve, parser=serve)
    _add_fields(serve.add_argument_group("server"), ServerConfig)

    generate = commands.add_parser("generate", help="complete a prompt", epilog=GENERATE_EXAMPLES)
    generate.set_defaults(run=run_generate, parser=generate)
    generate.add_argument("--chat", action="store_true", help="send the prompt as a chat message")

    chat = commands.add_parser("chat", help="talk to a model")
    chat.set_defaults(run=run_chat, parser=chat)
    chat.add_argument("--system", help="system message")

    for command in (serve, generate, chat):
        command.add_argument("model", metavar="MODEL", help="directory, .gguf file, hub id, or smollm2")
        group = command.add_argument_group("engine")
        _add_fields(group, EngineConfig, but=("model", "speculative_config"))
        _add_speculation(command)
    generate.add_argument("prompt", metavar="PROMPT", help="text, or - to read it from standard input")
    for command in (generate, chat):
        _add_sampling(command.add_argument_group("sampling"))

    for name in MORE_COMMANDS:
        try:
            module = import_module(name)
        except ModuleNotFoundError as missing:
            if missing.name is None or not name.startswith(missing.name):
                raise
        else:
            module.add_parser(commands)
    return parser


def _add_fields(group: Any, model: type[BaseModel], but: Sequence[str] = ()) -> None:
    """A flag per field, absent unless given: defaults stay in one place."""
    for name, field in model.model_fields.items():
        if name in but:
            continue
        flag = f"--{name.replace('_', '-')}"
        choices = _literals(field.annotation)
        default = None if field.default is None else f"default: {field.default}"
        notes = "; ".join(filter(None, (", ".join(choices), default)))
        text = " ".join(filter(None, (field.description, f"({notes})" if notes else ""))).replace("%", "%%")
        if field.annotation is bool:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text)
        else:
            metavar = name.rsplit("_", 1)[-1].upper()
            group.add_argument(flag, default=argparse.SUPPRESS, metavar=metavar, help=text)


def _literals(annotation: Any) -> list[str]:
    return [str(each) for each in get_args(annotation)] if get_origin(annotation) is Literal else []


def _add_speculation(command: argparse.ArgumentParser) -> None:
    keys = ", ".join(SpeculativeConfig.model_fields)
    group = command.add_argument_group("speculation")
    group.add_argument(SPECULATIVE, metavar="JSON", help=f"drafter and verification; keys: {keys}")
    group.add_argument(f"{SPECULATIVE}.KEY", metavar="VALUE", dest="_", help="one key of it; may be repeated")
    group.add_argument("--no-speculation", action="store_true", help="decode one token per step")


def _add_sampling(group: Any) -> None:
    group.add_argument("--max-tokens", type=int, default=256, metavar="N", help="longest output (default: 256)")
    for flag, kind, text in (
        ("--temperature", float, "0 is greedy"),
        ("--top-p", float, "smallest set of tokens with this mass"),
        ("--top-k", int, "most likely tokens"),
        ("--min-p", float, "least probability, relative to the likeliest token"),
    ):
        group.add_argument(flag, type=kind, help=f"{text} (default: the model's)")


# ---- from words to settings --------------------------------------------------------------------------------------


def _dashes(words: Sequence[str]) -> list[str]:
    """``--max_model_len`` means ``--max-model-len``, as in vLLM."""
    fixed = []
    for word in words:
        flag, equals, value = word.partition("=")
        name, dot, key = flag.partition(".")
        fixed.append(name.replace("_", "-") + dot + key + equals + value if word.startswith("--") else word)
    return fixed


def _take_dotted(words: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Words without ``--speculative-config.KEY VALUE`` pairs, and what those say. Values are JSON or else text."""
    kept: list[str] = []
    found: dict[str, Any] = {}
    rest = iter(words)
    for word in rest:
        flag, equals, value = word.partition("=")
        if not flag.startswith(f"{SPECULATIVE}."):
            kept.append(word)
            continue
        if not equals:
            value = next(rest, "")
        try:
            found[flag.removeprefix(f"{SPECULATIVE}.")] = json.loads(value)
        except json.JSONDecodeError:
            found[flag.removeprefix(f"{SPECULATIVE}.")] = value
    return kept, found


def engine_options(args: argparse.Namespace) -> EngineConfig:
    """The engine's settings as typed.

    Raises:
        UsageError: naming the flag that is wrong.
    """
    values = {name: getattr(args, name) for name in EngineConfig.model_fields if hasattr(args, name)}
    given = args.speculative_config
    try:
        parsed = json.loads(given) if given is not None else {}
    except json.JSONDecodeError as error:
        raise UsageError(f"{SPECULATIVE} is not valid JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise UsageError(f"{SPECULATIVE} must be a JSON object, got {given}")
    speculative = {**parsed, **args.dotted}
    if args.no_speculation and (speculative or given is not None):
        raise UsageError(f"--no-speculation contradicts {SPECULATIVE}; give one of them")
    values["speculative_config"] = None
    if not args.no_speculation:
        if speculative.get("method") is None and speculative.get("model") is None:
            speculative = {**_default_speculation(args.model), **speculative}
        values["speculative_config"] = speculative or None
    return validated(EngineConfig, values)


def _default_speculation(model: str) -> dict[str, Any]:
    from trimtab.llm import default_speculation

    chosen = default_speculation(model)
    return {} if chosen is None else chosen.model_dump(exclude_unset=True)


def validated(model: type[M], values: dict[str, Any]) -> M:
    """Settings of a config class.

    Raises:
        UsageError: naming the flag that is wrong.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        name, *keys = (str(part) for part in first["loc"] or ("",))
        flag = ".".join([f"--{name.replace('_', '-')}", *keys]) if name else "settings"
        message = first["msg"].removeprefix("Value error, ")
        value = first["input"]
        got = "" if isinstance(value, dict) else f", got {value!r}"
        raise UsageError(f"{flag}: {message[:1].lower()}{message[1:]}{got}") from error


def _refuse(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> NoReturn:
    word = next((word for word in unknown if word.startswith("-")), unknown[0])
    flags = [flag for flag in parser._option_string_actions if flag.startswith("--") and not flag.endswith(".KEY")]
    kind = "flag" if word.startswith("-") else "argument"
    hint = _suggestion(word.partition("=")[0], flags) if kind == "flag" else ""
    parser.exit(2, f'{parser.prog}: unknown {kind} "{word}"{hint} (see {parser.prog} --help)\n')


def _suggestion(word: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""


# ---- commands ----------------------------------------------------------------------------------------------------


@contextmanager
def _loading() -> Iterator[Callable[[str, float], None]]:
    """A progress bar on standard error while a model loads."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=1.0)
        yield lambda message, fraction: bar.update(task, description=message, completed=fraction)


def _load(config: EngineConfig) -> LLM:
    from trimtab.llm import LLM

    logging.getLogger("trimtab").setLevel(logging.INFO)
    with _loading() as progress:
        try:
            return LLM.from_config(config, progress)
        except ValueError as error:
            raise UsageError(str(error)) from error


def run_help(args: argparse.Namespace) -> int:
    """``trimtab`` alone."""
    args.parser.print_help()
    return 0


def run_serve(args: argparse.Namespace) -> int:
    """``trimtab serve``."""
    from trimtab.serving.config import ServerConfig

    values = {name: getattr(args, name) for name in ServerConfig.model_fields if hasattr(args, name)}
    values.setdefault("api_key", os.environ.get("TRIMTAB_API_KEY") or None)
    server = validated(ServerConfig, values)
    config = engine_options(args)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    started = time.monotonic()
    llm = _load(config)
    from trimtab.serving.server import serve

    def announce(url: str) -> None:
        key = " -H 'Authorization: Bearer $TRIMTAB_API_KEY'".replace("'", '"') if server.api_key else ""
        body = json.dumps({"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 32})
        print(f"Ready after {time.monotonic() - started:.1f} s: {config.model} at {url}  (docs at {url}/docs)")
        print(f"Try: curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'", flush=True)

    return serve(llm.engine, server, announce)


def _sampling(llm: LLM, args: argparse.Namespace) -> Any:
    names = ("max_tokens", "temperature", "top_p", "top_k", "min_p")
    try:
        return llm.default_params(**{name: value for name in names if (value := getattr(args, name)) is not None})
    except ValueError as error:
        raise UsageError(str(error)) from error


def run_generate(args: argparse.Namespace) -> int:
    """``trimtab generate``."""
    config = engine_options(args)
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    with closing(_load(config)) as llm:
        params = _sampling(llm, args)
        messages = [{"role": "user", "content": prompt}] if args.chat else None
        try:
            _, metrics = _stream(llm, llm.template(messages) if messages else prompt, params)
        except ValueError as error:
            raise UsageError(str(error)) from error
        print(metrics, file=sys.stderr)
    return 0


def run_chat(args: argparse.Namespace) -> int:
    """``trimtab chat``: a line is a message; an empty one or the end of input leaves."""
    config = engine_options(args)
    with closing(_load(config)) as llm:
        params = _sampling(llm, args)
        messages = [{"role": "system", "content": args.system}] if args.system else []
        interactive = sys.stdin.isatty()
        if interactive:
            print("An empty line or Ctrl-D leaves; Ctrl-C stops an answer.", file=sys.stderr)
        while True:
            try:
                line = input("> " if interactive else "").strip()
            except (EOFError, KeyboardInterrupt):
                return 0
            if not line:
                return 0
            messages.append({"role": "user", "content": line})
            try:
                text, metrics = _stream(llm, llm.template(messages), params)
            except ValueError as error:
                raise UsageError(str(error)) from error
            messages.append({"role": "assistant", "content": text})
            print(metrics, file=sys.stderr)


def _stream(llm: LLM, prompt: Any, params: Any) -> tuple[str, str]:
    """Print an answer as it comes; its text, and a line about its speed. Ctrl-C ends it early."""
    text, num_tokens, start, error, metrics = "", 0, time.perf_counter(), None, None
    with closing(llm.stream(prompt, params)) as outputs:
        try:
            for output in outputs:
                print(output.text, end="", flush=True)
                text += output.text
                num_tokens += len(output.token_ids)
                error, metrics = output.error, output.metrics
        except KeyboardInterrupt:
            pass
    print()
    if error is not None:
        raise UsageError(f"generation failed: {error}")
    return text, _speed(num_tokens, time.perf_counter() - start, metrics)


def _speed(num_tokens: int, seconds: float, metrics: RequestMetrics | None) -> str:
    line = f"[{num_tokens} tokens, {num_tokens / seconds:.1f} tokens/s"
    if metrics is not None and metrics.num_drafted:
        line += (
            f"; acceptance length {metrics.acceptance_length:.2f}; drafted {metrics.num_drafted}, verified "
            f"{metrics.num_verified}, accepted {metrics.num_accepted}; trimmed "
            f"{1 - metrics.num_verified / metrics.num_drafted:.0%}"
        )
    return line + "]"


if __name__ == "__main__":
    sys.exit(main())
