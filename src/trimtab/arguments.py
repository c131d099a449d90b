"""Command-line flags made from the fields of settings, so that flags, defaults and help can not drift apart."""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from trimtab.engine.config import EngineConfig, SpeculativeConfig

Settings = TypeVar("Settings", bound=BaseModel)
SPECULATION = "--speculative-config"
MODEL_HELP = "smollm2 (embedded), a directory, a .gguf file, or a hub id"


class UsageError(ValueError):
    """What was asked for can not be done; the message is one line and names the remedy."""


class Parser(argparse.ArgumentParser):
    """Answers a mistake with one line that names the flag that was probably meant."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse does it, but a flag that nobody knows ends it here, where the known ones are at hand."""
        parsed, unknown = super().parse_known_args(args, namespace)
        for word in unknown:
            if word.startswith("--"):
                flag = word.split("=")[0]
                known = [name for name in self._option_string_actions if name.startswith("--")]
                self.error(f"unknown flag {flag}" + meant(flag, known))
        return parsed, unknown


def meant(word: str, known: Iterable[str]) -> str:
    """', did you mean x?' if something close is known, else nothing."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f", did you mean {close[0]}?" if close else ""


def normalize(arguments: Sequence[str]) -> list[str]:
    """Spell flags our way: ``--max_model_len`` with dashes, ``--speculative-config.method x`` as part of the JSON.

    Raises:
        UsageError: for a dotted flag without a value, or JSON that can not take one.
    """
    plain: list[str] = []
    dotted: dict[str, Any] = {}
    words = iter(arguments)
    for word in words:
        if word == "--":
            plain += ["--", *words]
            break
        if not word.startswith("--"):
            plain.append(word)
            continue
        flag, equals, value = word.partition("=")
        base, dot, key = flag.partition(".")
        base = base.replace("_", "-")
        if base == SPECULATION and dot:
            if not equals and (value := next(words, "--")).startswith("--"):
                raise UsageError(f"{flag} needs a value")
            dotted[key.replace("-", "_")] = _json_or_text(value)
        else:
            plain.append(base + dot + key + equals + value)
    return _with_json(plain, dotted) if dotted else plain


def _with_json(arguments: list[str], dotted: dict[str, Any]) -> list[str]:
    for index, word in enumerate(arguments):
        if word == SPECULATION and index + 1 < len(arguments):
            given, rest = arguments[index + 1], arguments[:index] + arguments[index + 2 :]
        elif word.startswith(f"{SPECULATION}="):
            given, rest = word.partition("=")[2], arguments[:index] + arguments[index + 1 :]
        else:
            continue
        return [*rest, f"{SPECULATION}={json.dumps(parse_speculation(given) | dotted)}"]
    return [*arguments, f"{SPECULATION}={json.dumps(dotted)}"]


def _json_or_text(value: str) -> Any:
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value


def parse_speculation(text: str) -> dict[str, Any]:
    """The object that ``--speculative-config`` was given.

    Raises:
        UsageError: if it is no JSON object.
    """
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"{SPECULATION}: not valid JSON ({error.msg} at character {error.pos + 1}): {text}") from None
    if not isinstance(value, dict):
        raise UsageError(f'{SPECULATION}: give a JSON object such as {{"method": "ngram"}}, got {text}')
    return value


def add_settings(parser: argparse._ActionsContainer, settings: type[BaseModel], skip: Iterable[str] = ()) -> None:
    """One flag for each field of ``settings``; only flags that were given end up in the namespace."""
    for name, field in settings.model_fields.items():
        if name not in skip:
            parser.add_argument(f"--{name.replace('_', '-')}", **_flag_options(name, field))


def _flag_options(name: str, field: FieldInfo) -> dict[str, Any]:
    default = "" if field.default in (None, (), False) else f" (default: {str(field.default).lower()})"
    options: dict[str, Any] = {
        "help": f"{field.description or name}{default}".replace("%", "%%"),
        "default": argparse.SUPPRESS,
        "dest": name,
    }
    kinds = [kind for kind in (field.annotation, *get_args(field.annotation)) if kind is not type(None)]
    if bool in kinds:
        return options | {"action": argparse.BooleanOptionalAction}
    for kind in kinds:
        if get_origin(kind) is Literal:
            return options | {"choices": get_args(kind)}
    if get_origin(field.annotation) is tuple:
        return options | {"action": "extend", "nargs": "+", "metavar": name.split("_")[-1].upper()}
    return options | {"metavar": "N" if int in kinds or float in kinds else name.split("_")[-1].upper()}


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """MODEL, the speculation flags, and one flag for each engine setting."""
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    speculation = parser.add_argument_group("speculative decoding")
    keys = ", ".join(SpeculativeConfig.model_fields)
    speculation.add_argument(
        SPECULATION,
        metavar="JSON",
        help="drafter and verification; default: ngram; none: plain decoding. "
        f"Also by key: {SPECULATION}.num_speculative_tokens 5. Keys: {keys}",
    )
    speculation.add_argument("--no-speculation", action="store_true", help="decode plainly")
    engine = parser.add_argument_group("model and engine")
    add_settings(engine, EngineConfig, skip=("model", "speculative_config"))


def settings_from(arguments: argparse.Namespace, settings: type[Settings], **others: Any) -> Settings:
    """The settings that the given flags ask for.

    Raises:
        UsageError: for a value that does not fit, naming the flag.
    """
    given = {name: getattr(arguments, name) for name in settings.model_fields if hasattr(arguments, name)}
    try:
        return settings(**(given | others))
    except ValidationError as error:
        first = error.errors()[0]
        flag = ".".join(str(part) for part in first["loc"])
        flag = "--" + ("-".join(flag.split("_")) if "." not in flag else flag.replace("_", "-", 1))
        message = first["msg"].removeprefix("Value error, ")
        got = "" if first["type"] == "value_error" else f", got {first['input']!r}"
        raise UsageError(f"{flag}: {message[0].lower()}{message[1:]}{got}") from None


def engine_config_from(arguments: argparse.Namespace) -> EngineConfig:
    """The engine that the given flags ask for; what is not said about speculation is the model's default.

    Raises:
        UsageError: for a value that does not fit, naming the flag.
    """
    text = arguments.speculative_config
    if arguments.no_speculation and text is not None:
        raise UsageError(f"{SPECULATION} and --no-speculation contradict each other; give one")
    if arguments.no_speculation or text == "none":
        return settings_from(arguments, EngineConfig, speculative_config=None)
    given = parse_speculation(text) if text is not None else {}
    settings_from(arguments, EngineConfig, speculative_config=given)  # other mistakes are named first
    if given.get("method") is None and given.get("model") is None:
        from trimtab.llm import default_speculation

        given = default_speculation().model_dump(exclude_unset=True) | given
    return settings_from(arguments, EngineConfig, speculative_config=given)
