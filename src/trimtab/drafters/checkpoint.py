"""Opens drafter checkpoints and fills networks from them; refuses those that were made for another target."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from trimtab.drafters.formats import CheckpointError, Parsed, is_mtp_tensor, parse, parse_mtp
from trimtab.drafters.networks import DraftNetwork, DraftShape
from trimtab.models.executor import ModelExecutor
from trimtab.models.fusion import fuse
from trimtab.models.loader import resolve_model
from trimtab.models.quantization import Int8Linear, replace_linears

SHIPPED = Path(__file__).parent / "shipped"
SMALL_LINEAR = 1 << 16  # weights; below, a float product is faster than an int8 one
SHARED = ("embed_tokens.weight", "lm_head.weight", "d2t", "t2d")
# Copies of the target's own weights that some checkpoints carry, and what only training used.
IGNORED = ("verifier_lm_head.", "verifier_norm.", "rotary_emb.", "target_model.")


@dataclass(frozen=True, slots=True)
class DraftCheckpoint:
    """A drafter's weights, ready for a network.

    Attributes:
        vocab_map: ``[draft_vocab_size]`` int64 target id of each draft id, or None.
        features_after_norm: it reads the target's last hidden state behind the final norm.
    """

    source: str
    shape: DraftShape
    tensors: dict[str, Tensor]
    vocab_map: Tensor | None
    features_after_norm: bool


def locate(name: str) -> Path:
    """Directory of a drafter: a path, the name of a shipped one, or a hub id (downloaded).

    Raises:
        CheckpointError: if it is none of these.
    """
    if (SHIPPED / name / "config.json").is_file():
        return SHIPPED / name
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    shipped = sorted(entry.name for entry in SHIPPED.glob("*") if (entry / "config.json").is_file())
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise CheckpointError(f'drafter "{name}" is no directory; shipped drafters: {", ".join(shipped) or "none"}')
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.bin"]))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(f'drafter "{name}" can not be downloaded: {error}') from error


def open_checkpoint(name: str, target: ModelExecutor, allow_lossy: bool = False) -> DraftCheckpoint:
    """Read a drafter checkpoint in any published format.

    Raises:
        CheckpointError: if it is unknown, made for another target, or lossy without ``allow_lossy``.
    """
    directory = locate(name)
    config = _config(directory)
    tensors = _read(directory, lambda _: True)
    return _check(str(directory), parse(config, tensors, target.info, allow_lossy), target)


def open_mtp(target: ModelExecutor, name: str | None = None) -> DraftCheckpoint:
    """Read the MTP modules of the target's own checkpoint.

    Raises:
        CheckpointError: if it has none.
    """
    directory = Path(resolve_model(name or target.loaded.name))
    if not directory.is_dir():
        raise CheckpointError(f'MTP modules are read from a checkpoint directory, "{directory}" is none')
    tensors = _read(directory, lambda tensor: is_mtp_tensor(tensor, target.info.num_layers))
    return _check(str(directory), parse_mtp(_config(directory), tensors, target.info), target)


def _check(source: str, parsed: Parsed, target: ModelExecutor) -> DraftCheckpoint:
    shape, tensors = parsed.shape, parsed.tensors
    width = tensors["fc.weight"].shape[1] if "fc.weight" in tensors else None
    taps = len(shape.taps) * target.info.hidden_size + (shape.hidden_size if shape.kind == "eagle" else 0)
    if width is not None and width != taps:
        raise CheckpointError(
            f"{source}: fc reads {width} features, {len(shape.taps)} taps of this target (hidden size "
            f"{target.info.hidden_size}) give {taps}; it was made for another target"
        )
    if shape.kind == "mtp" and shape.hidden_size != target.info.hidden_size:
        raise CheckpointError(
            f"{source}: hidden size is {shape.hidden_size}, the target's is {target.info.hidden_size}; "
            "it was made for another target"
        )
    vocab_map = None
    if shape.draft_vocab_size != shape.vocab_size:
        if "d2t" not in tensors:
            raise CheckpointError(f"{source}: a reduced vocabulary of {shape.draft_vocab_size} without d2t")
        # d2t holds offsets: draft id i is target id i + d2t[i]
        vocab_map = torch.arange(shape.draft_vocab_size) + tensors["d2t"].long()
        if len(torch.unique(vocab_map)) != len(vocab_map) or not 0 <= int(vocab_map.min()) <= int(vocab_map.max()):
            raise CheckpointError(f"{source}: d2t does not map each draft id to a target id of its own")
        if int(vocab_map.max()) >= target.info.vocab_size:
            raise CheckpointError(
                f"{source}: d2t names token {int(vocab_map.max())}, the target has {target.info.vocab_size}"
            )
        if "t2d" in tensors and not torch.equal(tensors["t2d"].bool().nonzero().flatten(), vocab_map.sort().values):
            raise CheckpointError(f"{source}: t2d and d2t name different tokens")
    return DraftCheckpoint(source, shape, tensors, vocab_map, parsed.after_norm)


Network = TypeVar("Network", bound=DraftNetwork)


def fill(network: Network, checkpoint: DraftCheckpoint, target: ModelExecutor) -> Network:
    """Load the checkpoint into the network; what it leaves out is the target's. int8 targets get int8 drafters.

    Raises:
        CheckpointError: if a tensor is missing, left over, or of another shape.
    """
    own = {
        name: tensor
        for name, tensor in checkpoint.tensors.items()
        if name not in SHARED and not name.startswith(IGNORED)
    }
    expected = network.state_dict()
    missing, extra = sorted(set(expected) - set(own)), sorted(set(own) - set(expected))
    wrong = [name for name in expected if name in own and own[name].shape != expected[name].shape]
    if missing or extra or wrong:
        details = [f"missing {missing[:4]}" if missing else "", f"unknown {extra[:4]}" if extra else ""]
        details += [f"{name} is {list(own[name].shape)}, not {list(expected[name].shape)}" for name in wrong[:4]]
        raise CheckpointError(f"{checkpoint.source} ({network.shape.kind}): {'; '.join(d for d in details if d)}")
    network.load_state_dict(own)
    shape = network.shape
    embedding = checkpoint.tensors.get("embed_tokens.weight")
    if embedding is not None:
        network.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size, _weight=embedding.to(torch.float32))
    head = checkpoint.tensors.get("lm_head.weight")
    if head is not None and head.shape != (shape.draft_vocab_size, shape.hidden_size):
        raise CheckpointError(
            f"{checkpoint.source}: lm_head is {list(head.shape)}, not {[shape.draft_vocab_size, shape.hidden_size]}"
        )
    if head is None and checkpoint.vocab_map is not None:
        head = head_rows(target, checkpoint.vocab_map)
    if head is not None:
        network.lm_head = nn.Linear(shape.hidden_size, shape.draft_vocab_size, bias=False, device="meta")
        network.lm_head.weight = nn.Parameter(head.to(torch.float32))
    network.requires_grad_(False).eval()
    fuse(network)
    if target.loaded.dtype == "int8":
        replace_linears(network, _quantized)
    else:
        network.to(target.dtype)
    network.to(target.device)
    # borrowed modules come last: they are the target's and must not be converted
    if network.embed_tokens is None:
        network.embed_tokens = target.embed_tokens
    if network.lm_head is None:
        network.lm_head = target.lm_head
    return network


def _quantized(_name: str, linear: nn.Linear) -> nn.Module:
    """int8 where it saves time: scaling the rows of a small product costs more than the product."""
    if linear.weight.numel() < SMALL_LINEAR:
        return linear
    return Int8Linear(linear.weight.data, None if linear.bias is None else linear.bias.data)


def head_rows(target: ModelExecutor, ids: Tensor) -> Tensor:
    """Float rows ``[n, hidden_size]`` of the target's head."""
    head: Any = target.lm_head
    if not isinstance(head, Int8Linear):
        rows: Tensor = head.weight.detach()[ids.to(head.weight.device)]
        return rows.cpu().float()
    if getattr(target.loaded.model.config, "tie_word_embeddings", False):
        embedding: Any = target.embed_tokens
        return embedding.weight.detach()[ids].float()  # type: ignore[no-any-return]
    stored = head.tensors()
    return stored["int8_weight"][ids].float() * stored["scales"][ids, None]


def _config(directory: Path) -> dict[str, Any]:
    path = directory / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{directory} has no config.json")
    config: dict[str, Any] = json.loads(path.read_text())
    return config


def _read(directory: Path, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
    """Tensors of a directory whose names are wanted, from safetensors or a PyTorch file."""
    from safetensors import safe_open

    tensors: dict[str, Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys() if wanted(name)}  # noqa: SIM118
    if not tensors:
        for path in sorted(directory.glob("*.bin")):
            loaded = torch.load(path, map_location="cpu", weights_only=True)
            tensors |= {name: tensor for name, tensor in loaded.items() if wanted(name)}
    if not tensors and not any(directory.glob("*.safetensors")):
        raise CheckpointError(f"{directory} holds no weights (*.safetensors or *.bin)")
    return tensors
