"""The command line: ``trimtab serve | generate | chat | train``.

A command is a module with ``add_parser(subparsers)``, which adds its parser and sets ``run``, a function from the
parsed arguments to the exit code. It is imported only when it is called, so help needs no torch.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from trimtab import __version__

COMMANDS = {
    "serve": ("trimtab.serving.command", "serve a model over an OpenAI-compatible HTTP API"),
    "generate": ("trimtab.terminal", "complete one prompt and say how the drafts fared"),
    "chat": ("trimtab.terminal", "talk to a model in the terminal"),
    "train": ("trimtab.training.cli", "train a drafter on a model's own answers"),
}
HEAD = """usage: trimtab COMMAND [options]

Serve language models with speculative decoding; verify only the draft tokens that pay for themselves.

commands:"""
EXAMPLES = """
examples:
  trimtab serve smollm2                             serve the embedded model on port 8000
  trimtab generate smollm2 "Why is the sky blue?"   one answer, streamed, with its acceptance length
  trimtab chat smollm2                              a conversation
  trimtab serve --help                              every flag of a command"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0, 1 (it failed), 2 (it was asked for wrongly), 130 (interrupted)."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words in (["--version"], ["-V"]):
        print(f"trimtab {__version__}")
        return 0
    if not words or words[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0
    if words[0] not in COMMANDS:
        return _complain(_unknown(words[0]))
    return _run(words)


def _overview() -> str:
    width = max(map(len, COMMANDS)) + 2
    lines = [f"  {name:{width}}{summary}" for name, (_, summary) in COMMANDS.items()]
    return "\n".join([HEAD, *lines, EXAMPLES])


def _unknown(word: str) -> str:
    what = "flag" if word.startswith("-") else "command"
    close = difflib.get_close_matches(word, [*COMMANDS, "--help", "--version"], n=1)
    return f'trimtab: unknown {what} "{word}"; ' + (
        f"did you mean {close[0]}?" if close else f"known: {', '.join(COMMANDS)}"
    )


def _run(words: list[str]) -> int:
    from trimtab.arguments import Parser, UsageError, normalize

    parser = Parser(prog="trimtab")
    subparsers = parser.add_subparsers(dest="command", parser_class=Parser)
    import_module(COMMANDS[words[0]][0]).add_parser(subparsers)
    try:
        parsed = parser.parse_args([words[0], *normalize(words[1:])])
        code: int = parsed.run(parsed)
    except UsageError as error:
        return _complain(f"trimtab {words[0]}: {error}")
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has left, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


def _complain(message: str) -> int:
    print(message, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
