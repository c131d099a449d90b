"""Drafters, by method name. Other packages add theirs through the entry point group ``trimtab.drafters``.

A kind is a function ``build(speculative, target) -> Drafter``: ``speculative`` are the settings of
``--speculative-config``, ``target`` the executor whose committed tokens it drafts for.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from trimtab.drafters.base import DraftBatch, Drafter, DraftSampler

if TYPE_CHECKING:
    from trimtab.models.executor import ModelExecutor

Builder = Callable[[Any, "ModelExecutor"], Drafter]

BUILT_IN = {
    "ngram": "trimtab.drafters.ngram:build",
    "draft_model": "trimtab.drafters.draft_model:build",
    "eagle": "trimtab.drafters.kinds:build",
    "eagle3": "trimtab.drafters.kinds:build",
    "mtp": "trimtab.drafters.kinds:build",
    "dflash": "trimtab.drafters.kinds:build",
    "dspark": "trimtab.drafters.kinds:build",
}
GROUP = "trimtab.drafters"


def methods() -> list[str]:
    """Every known method name, built in or installed."""
    return sorted({*BUILT_IN, *(entry.name for entry in entry_points(group=GROUP))})


def make_drafter(speculative: Any, target: ModelExecutor) -> Drafter:
    """The drafter that ``speculative`` (`SpeculativeConfig` or its like) asks for.

    Without a method the checkpoint's own kind is taken; without a model the shipped one for this target.

    Raises:
        ValueError: if the method is unknown or the drafter does not fit the target.
    """
    method = speculative.method
    if method is None:
        return _load(BUILT_IN["dspark"])(speculative, target)
    for entry in entry_points(group=GROUP):
        if entry.name == method:
            builder: Builder = entry.load()
            return builder(speculative, target)
    if method not in BUILT_IN:
        close = difflib.get_close_matches(method, methods(), n=1)
        hint = f'did you mean "{close[0]}"? ' if close else ""
        raise ValueError(f'unknown speculative method "{method}"; {hint}known: {", ".join(methods())}')
    return _load(BUILT_IN[method])(speculative, target)


def _load(path: str) -> Builder:
    module, name = path.split(":")
    builder: Builder = getattr(import_module(module), name)
    return builder


def check_drafter(drafter: Drafter, target: ModelExecutor, seed: int = 0) -> None:
    """Try a drafter on what the engine relies on; see :func:`trimtab.drafters.conformance.check_drafter`.

    Raises:
        ConformanceError: naming the first rule that is broken.
    """
    from trimtab.drafters.conformance import check_drafter as check

    check(drafter, target, seed)


__all__ = ["DraftBatch", "DraftSampler", "Drafter", "check_drafter", "make_drafter", "methods"]
