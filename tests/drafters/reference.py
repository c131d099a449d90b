"""Drafter forwards written out densely from the papers: whole sequences, no cache, no module of the package."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tests.drafters.layouts import BLOCK, DRAFT_IDS, EPS, HEADS, KV, MASK, THETA, D, Layout


def norm(tensors: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * tensors[name + ".weight"]


def linear(tensors: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return functional.linear(x, tensors[name + ".weight"], tensors.get(name + ".bias"))


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding as multiplication of complex numbers."""
    frequencies = THETA ** (-torch.arange(0, D, 2) / D)
    turn = torch.polar(torch.ones(len(positions), D // 2), positions[:, None] * frequencies)
    pairs = torch.complex(x[..., : D // 2], x[..., D // 2 :]) * turn[:, None]
    return torch.cat([pairs.real, pairs.imag], dim=-1)


def attention(
    t: dict[str, Tensor], name: str, x: Tensor, kv: Tensor, q_at: Tensor, k_at: Tensor, visible: Tensor
) -> Tensor:
    """``x [T, ...]`` attends to ``kv [S, ...]`` where ``visible [T, S]``."""
    q = linear(t, name + ".q_proj", x).view(len(x), HEADS, D)
    k = linear(t, name + ".k_proj", kv).view(len(kv), KV, D)
    v = linear(t, name + ".v_proj", kv).view(len(kv), KV, D).repeat_interleave(HEADS // KV, 1)
    if name + ".q_norm.weight" in t:
        q, k = norm(t, name + ".q_norm", q), norm(t, name + ".k_norm", k)
    q, k = rotate(q, q_at), rotate(k, k_at).repeat_interleave(HEADS // KV, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / D**0.5
    probs = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return linear(t, name + ".o_proj", torch.einsum("hqk,khd->qhd", probs, v).flatten(1))


def mlp(t: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    gated = functional.silu(linear(t, name + ".gate_proj", x)) * linear(t, name + ".up_proj", x)
    return linear(t, name + ".down_proj", gated)


def causal(size: int) -> Tensor:
    return torch.ones(size, size).tril().bool()


class Target:
    """What a drafter borrows: embedding, head and final norm."""

    def __init__(self, model: Any) -> None:
        self.embedding = model.get_input_embeddings().weight.detach()
        self.head = model.get_output_embeddings().weight.detach()
        self.norm = {"norm.weight": model.base_model.norm.weight.detach()}


def draft_logits(
    layout: Layout, target: Target, features: Tensor, tokens: Tensor, drafts: list[int]
) -> tuple[Tensor, Tensor | None]:
    """Logits ``[K, draft vocabulary]`` and confidence logits ``[K]`` of a request.

    Args:
        features: ``[n, width]`` taps of the n committed positions.
        tokens: ``[n + 1]`` known tokens, the newly emitted one last.
        drafts: the K - 1 or more tokens drafted so far.
    """
    t = layout.reference()
    embedding = t.get("embed_tokens.weight", target.embedding)
    head = t.get("lm_head.weight", target.head if layout.draft_ids is None else target.head[DRAFT_IDS])
    if layout.kind in ("dflash", "dspark"):
        return _block(layout, t, embedding, head, features, tokens, drafts)
    step = {"eagle3": _eagle3, "eagle": _eagle, "mtp": _mtp}[layout.kind]
    if layout.kind != "eagle3":
        features = norm(target.norm, "norm", features)
    states, ids = step(layout, t, None, features, None)[0], tokens[1:]
    logits = []
    for k in range(len(drafts) + 1):
        hidden, recycled = step(layout, t, embedding[ids], states, torch.arange(len(states)))
        logits.append(head @ _head_input(layout, t, hidden[-1]))
        # beyond the committed positions the drafter continues on its own states
        states = torch.cat([states, recycled[-1:]])
        if k < len(drafts):
            ids = torch.cat([ids, torch.tensor([drafts[k]])])
    return torch.stack(logits), None


def _head_input(layout: Layout, t: dict[str, Tensor], hidden: Tensor) -> Tensor:
    return norm(t, "norm", hidden) if layout.kind == "eagle3" else hidden


def _eagle3(layout: Layout, t: dict[str, Tensor], embedded: Any, states: Tensor, at: Any) -> tuple[Tensor, Tensor]:
    config = layout.config
    if embedded is None:
        if config.get("norm_before_fc"):
            states = norm(t, "input_norm", states)
        if config.get("fc_norm"):
            states = torch.cat([norm(t, f"fc_norm.{i}", part) for i, part in enumerate(states.chunk(3, -1))], -1)
        return linear(t, "fc", states), states
    normed = norm(t, "layers.0.hidden_norm", states)
    both = torch.cat([norm(t, "layers.0.input_layernorm", embedded), normed], -1)
    x = normed if config.get("norm_before_residual") else states
    x = x + attention(t, "layers.0.self_attn", both, both, at, at, causal(len(x)))
    x = x + mlp(t, "layers.0.mlp", norm(t, "layers.0.post_attention_layernorm", x))
    return x, norm(t, "norm", x) if config.get("norm_output") else x


def _eagle(layout: Layout, t: dict[str, Tensor], embedded: Any, states: Tensor, at: Any) -> tuple[Tensor, Tensor]:
    if embedded is None:
        return states, states
    x = linear(t, "fc", torch.cat([embedded, states], -1))
    x = x + attention(t, "layers.0.self_attn", x, x, at, at, causal(len(x)))
    x = x + mlp(t, "layers.0.mlp", norm(t, "layers.0.post_attention_layernorm", x))
    return x, x


def _mtp(layout: Layout, t: dict[str, Tensor], embedded: Any, states: Tensor, at: Any) -> tuple[Tensor, Tensor]:
    if embedded is None:
        return states, states
    x = linear(t, "0.eh_proj", torch.cat([norm(t, "0.enorm", embedded), norm(t, "0.hnorm", states)], -1))
    normed = norm(t, "0.layer.input_layernorm", x)
    x = x + attention(t, "0.layer.self_attn", normed, normed, at, at, causal(len(x)))
    x = x + mlp(t, "0.layer.mlp", norm(t, "0.layer.post_attention_layernorm", x))
    x = norm(t, "0.norm", x)
    return x, x


def convolve(t: dict[str, Tensor], name: str, source: Tensor, x: Tensor, side: int) -> Tensor:
    """Grouped dynamic convolution along the block, one row and one tap at a time."""
    if name + ".base_kernel" not in t:
        return x
    delta = linear(t, name + ".kernel_projection", source).view(len(x), 2, 2, -1)
    out = torch.zeros_like(x)
    for i in range(len(x)):
        for tap in range(min(i + 1, 2)):
            kernel = t[name + ".base_kernel"][side, tap] + delta[i, side, tap].repeat_interleave(8)
            out[i] += kernel * x[i - tap]
    return out


def _block(
    layout: Layout, t: dict[str, Tensor], embedding: Tensor, head: Tensor, features: Tensor, tokens: Tensor, drafts: Any
) -> tuple[Tensor, Tensor | None]:
    n = len(features)
    context = norm(t, "hidden_norm", linear(t, "fc", features))
    at = torch.arange(n + BLOCK)
    x = embedding[torch.tensor([int(tokens[-1])] + [MASK] * (BLOCK - 1))]
    own = causal(BLOCK) if layout.config.get("is_causal") else torch.ones(BLOCK, BLOCK).bool()
    visible = torch.cat([torch.ones(BLOCK, n).bool(), own], 1)
    for i in range(layout.config.get("num_hidden_layers", 1)):
        normed = norm(t, f"layers.{i}.input_layernorm", x)
        mixed = convolve(t, f"layers.{i}.attention_conv", normed, normed, 0)
        keys = torch.cat([context, mixed])
        out = attention(t, f"layers.{i}.self_attn", mixed, keys, at[n:], at, visible)
        x = x + convolve(t, f"layers.{i}.attention_conv", normed, out, 1)
        normed = norm(t, f"layers.{i}.post_attention_layernorm", x)
        out = mlp(t, f"layers.{i}.mlp", convolve(t, f"layers.{i}.mlp_conv", normed, normed, 0))
        x = x + convolve(t, f"layers.{i}.mlp_conv", normed, out, 1)
    hidden = norm(t, "norm", x)
    hidden = hidden if layout.from_anchor else hidden[1:]
    before = torch.tensor([int(tokens[-1]), *drafts])[: len(hidden)]
    logits, confidence, state = [], [], torch.zeros(t["markov_head.markov_w1.weight"].shape[1] if layout.markov else 0)
    for row, previous in zip(hidden, before, strict=False):
        scores = head @ row
        if "candidate_selector.predecessor_codebook" in t:
            gate = t["candidate_selector.predecessor_codebook"][previous]
            gate = gate * linear(t, "candidate_selector.hidden_projection", row)
            best = scores.topk(4).indices
            kept = torch.full_like(scores, float("-inf"))
            kept[best] = scores[best] + t["candidate_selector.successor_codebook"][best] @ gate
            scores = kept
        if layout.markov:
            e = t["markov_head.markov_w1.weight"][previous]
            latent = e
            if layout.markov == "gated":
                latent = e * torch.sigmoid(linear(t, "markov_head.gate_proj", torch.cat([row, e])))
            elif layout.markov == "rnn":
                gate, candidate, out = linear(t, "markov_head.joint_proj", torch.cat([state, e, row])).chunk(3)
                state = torch.sigmoid(gate) * state + (1 - torch.sigmoid(gate)) * torch.tanh(candidate)
                latent = torch.tanh(out)
            scores = scores + t["markov_head.markov_w2.weight"] @ latent
            confidence.append(linear(t, "confidence_head.proj", torch.cat([row, e]))[0])
        logits.append(scores)
    return torch.stack(logits), torch.stack(confidence) if confidence else None
