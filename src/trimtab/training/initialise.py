"""Start a drafter from what the target already knows, so that training does not spend its first hour on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.drafters.dflash import BlockNetwork
from trimtab.drafters.dspark import DSparkNetwork
from trimtab.drafters.eagle import EagleNetwork
from trimtab.drafters.eagle3 import Eagle3Network
from trimtab.drafters.mtp import MtpNetwork
from trimtab.drafters.networks import DraftNetwork
from trimtab.models.executor import ForwardBatch, ModelExecutor
from trimtab.models.fusion import FusedMLP, SharedProjection
from trimtab.training.store import StoreReader

QUIET = 0.2  # share of the target's final norm that a backbone starts with beside bigrams
GATE_OPEN = 2.0  # a gate bias that starts the gated Markov head near the vanilla one


@torch.no_grad()
def copy_layer(layer: Any, source: Any, columns: slice | None = None) -> None:
    """Copy a decoder layer of the target where shapes fit; ``columns`` are the attention inputs it reads."""
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = getattr(layer.self_attn, name).weight
        if columns is not None:
            weight.mul_(0.1)
            weight = weight[:, columns]
        _copy(weight, projection(source.self_attn, name))
    _copy(layer.self_attn.o_proj.weight, source.self_attn.o_proj.weight)
    for name in ("gate_proj", "up_proj", "down_proj"):
        _copy(getattr(layer.mlp, name).weight, projection(source.mlp, name))
    _copy(layer.post_attention_layernorm.weight, source.post_attention_layernorm.weight)
    if layer.input_layernorm is not None and columns is None:
        _copy(layer.input_layernorm.weight, source.input_layernorm.weight)


def projection(owner: Any, name: str) -> Tensor:
    """Weight of a projection of the target, fused with others or not."""
    if isinstance(owner, FusedMLP) and name != "down_proj":
        return torch.chunk(owner.gate_up_proj.weight, 2)[name == "up_proj"]
    module = getattr(owner, name)
    if isinstance(module, SharedProjection):
        group = owner.q_proj.group
        return torch.split(group.linear.weight, group.sizes)[module.index]
    weight: Tensor = module.weight
    return weight


def _copy(destination: Tensor, source: Tensor) -> None:
    if destination.shape == source.shape:
        destination.copy_(source)


@torch.no_grad()
def start_from_target(network: DraftNetwork, target: Any) -> None:
    """Copy layers, norms and projections from the target (a transformers model in a float type).

    Keys and values of a block drafter begin as those of the target layer that reads the deepest tap, and an
    autoregressive drafter begins as that layer with the next token's embedding beside it.
    """
    body, shape = target.base_model, network.shape
    hidden_size, num_taps = shape.hidden_size, len(shape.taps)
    same_width = shape.target_hidden_size == hidden_size == target.config.hidden_size
    last = len(body.layers) - 1
    deepest = min(max(shape.taps), last)
    if not same_width:
        return
    if isinstance(network, BlockNetwork):
        _select(network.fc.weight, shape.taps.index(max(shape.taps)), num_taps)
        network.hidden_norm.weight.copy_(body.layers[deepest].input_layernorm.weight)
        for index, layer in enumerate(network.layers):
            copy_layer(layer, body.layers[min(deepest + index, last)])
        network.norm.weight.copy_(body.norm.weight)
    elif isinstance(network, Eagle3Network):
        _select(network.fc.weight, shape.taps.index(max(shape.taps)), num_taps)
        first: Any = network.layers[0]
        first.hidden_norm.weight.copy_(body.layers[deepest].input_layernorm.weight)
        copy_layer(first, body.layers[deepest], slice(hidden_size, 2 * hidden_size))
        network.norm.weight.copy_(body.norm.weight)
    elif isinstance(network, MtpNetwork):
        for module in network.mtp_layers:
            copy_layer(module.layer, body.layers[last])
            module.norm.weight.copy_(body.norm.weight)  # type: ignore[union-attr,operator]
    elif isinstance(network, EagleNetwork):
        for layer in network.layers:
            copy_layer(layer, body.layers[last])


def _select(weight: Tensor, tap: int, num_taps: int) -> None:
    """Make ``weight [H, num_taps * H]`` pass one tap through, with a little of the others."""
    size = weight.shape[0]
    weight.mul_(0.1)
    weight[:, tap * size : (tap + 1) * size] += torch.eye(size)
    assert weight.shape[1] == num_taps * size


def draft_vocabulary(reader: StoreReader, prompt_tokens: Sequence[Sequence[int]], size: int) -> tuple[Tensor, float]:
    """The ``size`` target ids that the target gives most probability to, ascending, and the mass they hold.

    Mass is summed over the target's laws, which counts what it could have said and not only what it did; prompts
    break ties among the ids that no law names.
    """
    mass = torch.zeros(reader.layout.vocab_size, dtype=torch.float64)
    total = 0.0
    for sample in reader.samples:
        ids, probs = reader.teacher(sample)
        mass.index_add_(0, ids.flatten(), probs.flatten().double())
        total += sample.num_rows
    prior = torch.zeros_like(mass)
    for tokens in prompt_tokens:
        prior += torch.bincount(torch.tensor(tokens), minlength=len(prior))
    score = mass + 0.01 * prior
    kept = score.topk(min(size, len(score))).indices.sort().values
    return kept, float(mass[kept].sum() / max(total, 1.0))


@torch.inference_mode()
def bigram_logits(executor: ModelExecutor, prefix: Sequence[int], tokens: Tensor, draft_ids: Tensor) -> Tensor:
    """What the target expects after each token with nothing but ``prefix`` before it.

    Args:
        prefix: a chat opening; cut to whole cache blocks, which all rows share.
        tokens: ``[n]``; ``draft_ids``: ``[draft_vocab_size]``.

    Returns:
        ``[n, draft_vocab_size]`` log probabilities, centred per row.
    """
    size = executor.block_size
    shared = list(prefix)[-(len(prefix) // size) * size :] if len(prefix) >= size else [*prefix] * size
    shared = shared[: len(shared) // size * size]
    blocks = list(range(len(shared) // size))
    executor.forward(ForwardBatch(torch.tensor(shared), [len(shared)], [0], [blocks], torch.tensor([0])))
    rows = []
    room = executor.cache.num_blocks - len(blocks)
    for chunk in torch.split(tokens, min(room, 128)):
        tables = [[*blocks, len(blocks) + i] for i in range(len(chunk))]
        count = len(chunk)
        batch = ForwardBatch(chunk, [1] * count, [len(shared)] * count, tables, torch.arange(count))
        logits = executor.forward(batch).logits.log_softmax(-1)[:, draft_ids]
        rows.append(logits - logits.mean(-1, keepdim=True))
    return torch.cat(rows)


@torch.no_grad()
def start_markov(network: DSparkNetwork, tokens: Tensor, bigrams: Tensor, importance: Tensor) -> None:
    """Set the Markov head to the best low-rank fit of ``bigrams [n, draft_vocab_size]``, the backbone near silence.

    One of the ranks holds what is common to all tokens, so a token without a row of its own starts from that.

    Args:
        tokens: ``[n]`` the token before, of each row.
        importance: ``[n]`` how often it occurs; the fit weighs its rows by the square root.
    """
    head = network.markov_head
    assert head is not None
    weights = (importance / importance.mean()).clamp(0.05, 20).sqrt().unsqueeze(1)
    common = (bigrams * weights.square()).sum(0) / weights.square().sum()
    rank = head.markov_w1.embedding_dim - 1
    left, singular, right = torch.svd_lowrank((bigrams - common) * weights, q=min(rank, len(tokens)), niter=2)
    balance = (singular / len(tokens) ** 0.5).sqrt()
    nn.init.zeros_(head.markov_w1.weight)
    nn.init.zeros_(head.markov_w2.weight)
    head.markov_w1.weight[:, -1] = 1
    head.markov_w2.weight[:, -1] = common
    head.markov_w1.weight[tokens, : left.shape[1]] = left * (singular / balance) / weights
    head.markov_w2.weight[:, : right.shape[1]] = right * balance
    network.norm.weight.mul_(QUIET)
    if head.variant == "gated":
        head.gate_proj.weight.zero_()
        head.gate_proj.bias.fill_(GATE_OPEN)
        head.markov_w2.weight.div_(torch.sigmoid(torch.tensor(GATE_OPEN)))
