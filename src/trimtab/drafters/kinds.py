"""Builds the drafters whose weights come from a checkpoint."""

from __future__ import annotations

from typing import Any

from trimtab.drafters.autoregressive import AutoregressiveDrafter
from trimtab.drafters.base import Drafter
from trimtab.drafters.checkpoint import SHIPPED, DraftCheckpoint, fill, open_checkpoint, open_mtp
from trimtab.drafters.dflash import BlockNetwork, DFlashDrafter
from trimtab.drafters.dspark import DSparkDrafter, DSparkNetwork
from trimtab.drafters.eagle import EagleNetwork
from trimtab.drafters.eagle3 import Eagle3Network
from trimtab.drafters.formats import CheckpointError
from trimtab.drafters.mtp import MtpNetwork
from trimtab.drafters.networks import AutoregressiveNetwork, DraftNetwork, DraftShape
from trimtab.models.executor import ModelExecutor
from trimtab.models.loader import EMBEDDED

NETWORKS: dict[str, type[DraftNetwork]] = {
    "eagle": EagleNetwork,
    "eagle3": Eagle3Network,
    "mtp": MtpNetwork,
    "dflash": BlockNetwork,
    "dspark": DSparkNetwork,
}
DEFAULT_METHOD = "dspark"


def build(speculative: Any, target: ModelExecutor) -> Drafter:
    """Open the checkpoint that the settings name (or the shipped or built-in one) and make its drafter.

    Raises:
        CheckpointError: if it does not fit the target or is not of the method asked for.
    """
    checkpoint = _open(speculative, target)
    method, kind = speculative.method, checkpoint.shape.kind
    if method is not None and method != kind:
        raise CheckpointError(f'{checkpoint.source} is a "{kind}" drafter, the method asked for is "{method}"')
    network = fill(make_network(checkpoint.shape), checkpoint, target)
    num_positions = _num_positions(speculative.num_speculative_tokens, network.shape)
    if isinstance(network, DSparkNetwork):
        return DSparkDrafter(checkpoint, network, target, num_positions)
    if isinstance(network, BlockNetwork):
        return DFlashDrafter(checkpoint, network, target, num_positions)
    assert isinstance(network, AutoregressiveNetwork)
    return AutoregressiveDrafter(checkpoint, network, target, num_positions)


def make_network(shape: DraftShape) -> DraftNetwork:
    """An untrained network of a kind."""
    return NETWORKS[shape.kind](shape)


def _open(speculative: Any, target: ModelExecutor) -> DraftCheckpoint:
    if speculative.model is not None:
        return open_checkpoint(speculative.model, target, speculative.allow_lossy)
    method = speculative.method or DEFAULT_METHOD
    shipped = f"{method}-{target.loaded.name}"
    if (SHIPPED / shipped / "config.json").is_file():
        return open_checkpoint(shipped, target, speculative.allow_lossy)
    if method == "mtp":
        return open_mtp(target)
    raise CheckpointError(
        f'no {method} drafter is shipped for "{target.loaded.name}" (only for {", ".join(EMBEDDED)}); '
        'name a checkpoint with "model", or use method "ngram" or "draft_model"'
    )


def _num_positions(asked: int | None, shape: DraftShape) -> int:
    if asked is None:
        return shape.num_positions
    limit = shape.block_size - (not shape.from_anchor) if shape.block_size else None
    if limit is not None and asked > limit:
        raise CheckpointError(f"num_speculative_tokens is {asked}, this drafter's block holds {limit}")
    return asked
