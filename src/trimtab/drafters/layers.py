"""Parts that every drafter network is built from. Parameter names are those of Llama-like checkpoints.

A network does not know where its keys and values live: each layer hands them to an `Attend` function. Training passes
a dense masked attention, serving a paged one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

# (layer index, queries [T, heads, D], keys [T, kv heads, D], values [T, kv heads, D]) -> [T, heads, D]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class RMSNorm(nn.Module):
    """``x / rms(x) * weight`` over the last axis."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        return functional.rms_norm(hidden, self.weight.shape, self.weight, self.eps)


class Rotary(nn.Module):
    """Rotary position embedding (Su et al. 2021), halves rotated as in Llama."""

    def __init__(self, head_dim: int, theta: float) -> None:
        super().__init__()
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        self.register_buffer("inverse_frequencies", theta**-exponents, persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines ``[T, 1, head_dim]`` of ``positions [T]``."""
        assert isinstance(self.inverse_frequencies, Tensor)
        angles = positions.float().unsqueeze(-1) * self.inverse_frequencies
        angles = torch.cat([angles, angles], dim=-1).unsqueeze(1)
        return angles.cos(), angles.sin()


def rotate(states: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Turn ``[T, heads, head_dim]`` by the cosines and sines of :class:`Rotary`."""
    cosines, sines = rotation
    first, second = states.chunk(2, dim=-1)
    return states * cosines + torch.cat([-second, first], dim=-1) * sines


class GatedMLP(nn.Module):
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.down_proj(self.act_fn(self.gate_proj(hidden)) * self.up_proj(hidden))
        return output


class Attention(nn.Module):
    """Projections around an `Attend` function; ``input_size`` differs from ``hidden_size`` in EAGLE-3."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        eps: float,
        *,
        input_size: int | None = None,
        qk_norm: bool = False,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        input_size = input_size or hidden_size
        self.q_proj = nn.Linear(input_size, num_heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(input_size, num_kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(input_size, num_kv_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=False)
        self.q_norm = RMSNorm(head_dim, eps) if qk_norm else None
        self.k_norm = RMSNorm(head_dim, eps) if qk_norm else None

    def queries(self, hidden: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """``[T, heads, head_dim]``."""
        states = self.q_proj(hidden).view(len(hidden), -1, self.head_dim)
        return rotate(states if self.q_norm is None else self.q_norm(states), rotation)

    def keys_values(self, hidden: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """``[T, kv heads, head_dim]`` each."""
        keys = self.k_proj(hidden).view(len(hidden), -1, self.head_dim)
        values = self.v_proj(hidden).view(len(hidden), -1, self.head_dim)
        return rotate(keys if self.k_norm is None else self.k_norm(keys), rotation), values


class DecoderLayer(nn.Module):
    """Pre-norm attention and gated MLP. ``has_input_norm`` is False in the first layer of EAGLE."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        eps: float,
        *,
        qk_norm: bool = False,
        bias: bool = False,
        has_input_norm: bool = True,
        input_size: int | None = None,
    ) -> None:
        super().__init__()
        self.self_attn = Attention(
            hidden_size, num_heads, num_kv_heads, head_dim, eps, input_size=input_size, qk_norm=qk_norm, bias=bias
        )
        self.mlp = GatedMLP(hidden_size, intermediate_size)
        self.input_layernorm = RMSNorm(hidden_size, eps) if has_input_norm else None
        self.post_attention_layernorm = RMSNorm(hidden_size, eps)

    def forward(self, hidden: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend, index: int) -> Tensor:
        """``[T, hidden_size]`` in and out."""
        normed = hidden if self.input_layernorm is None else self.input_layernorm(hidden)
        return self.finish(hidden, normed, rotation, attend, index)

    def finish(
        self, residual: Tensor, normed: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend, index: int
    ) -> Tensor:
        """Attention from ``normed [T, input_size]``, then the MLP, both added to ``residual [T, hidden_size]``."""
        queries = self.self_attn.queries(normed, rotation)  # first: a fused projection is asked in this order
        attended = attend(index, queries, *self.self_attn.keys_values(normed, rotation))
        hidden = residual + self.self_attn.o_proj(attended.flatten(1))
        output: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output
