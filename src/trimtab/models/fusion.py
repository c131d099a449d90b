"""Fewer and larger operations in a transformers model, with the same result.

A decoder layer of 576 channels spends as long in Python and kernel launches as in arithmetic when one token is
decoded. Query/key/value and gate/up projections read the same input: each set becomes one matrix. Every replacement
is compared with the module it replaces before it is kept, so an unknown architecture is left alone, not broken.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class RMSNorm(nn.Module):
    """One kernel for ``x / rms(x) * weight``."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.eps = eps
        self._shape = (weight.shape[0],)

    def forward(self, hidden: Tensor) -> Tensor:
        return functional.rms_norm(hidden, self._shape, self.weight, self.eps)


class FusedMLP(nn.Module):
    """``down(act(gate(x)) * up(x))`` with gate and up as one projection."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.gate_up_proj = concatenate_linears([mlp.gate_proj, mlp.up_proj])
        self.down_proj = mlp.down_proj
        self.act_fn = mlp.act_fn

    def forward(self, hidden: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(hidden).chunk(2, dim=-1)
        output: Tensor = self.down_proj(self.act_fn(gate) * up)
        return output


class SharedProjection(nn.Module):
    """One of several projections of the same input; the first one asked computes all of them."""

    def __init__(self, group: _ProjectionGroup, index: int) -> None:
        super().__init__()
        self.index = index
        if index == 0:
            self.group = group  # registered once, or its tensors would be listed once per projection
        self._take = group.take

    def forward(self, hidden: Tensor) -> Tensor:
        return self._take(hidden, self.index)


class _ProjectionGroup(nn.Module):
    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        super().__init__()
        self.linear = concatenate_linears(linears)
        self.sizes = [linear.out_features for linear in linears]
        self._input: Tensor | None = None
        self._outputs: Sequence[Tensor] = ()

    def take(self, hidden: Tensor, index: int) -> Tensor:
        # Holding the input keeps its identity meaningful: no other tensor can take its place while it is held.
        if self._input is not hidden:
            self._input = hidden
            self._outputs = self.linear(hidden).split(self.sizes, dim=-1)
        output = self._outputs[index]
        if index == len(self.sizes) - 1:
            self._input, self._outputs = None, ()
        return output


def concatenate_linears(linears: Sequence[nn.Linear]) -> nn.Linear:
    """One linear layer whose output is the concatenation of theirs."""
    first = linears[0]
    has_bias = any(linear.bias is not None for linear in linears)
    total = sum(linear.out_features for linear in linears)
    fused = nn.Linear(first.in_features, total, bias=has_bias, device="meta", dtype=first.weight.dtype)
    fused.weight = nn.Parameter(torch.cat([linear.weight.data for linear in linears]), requires_grad=False)
    if has_bias:
        biases = [
            linear.bias.data if linear.bias is not None else linear.weight.new_zeros(linear.out_features)
            for linear in linears
        ]
        fused.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
    return fused


@torch.no_grad()
def fuse(model: nn.Module, verify: bool = True) -> None:
    """Fuse what can be fused below ``model``, in place.

    Args:
        verify: compare each replacement with what it replaces; False only where that was done before (meta tensors).
    """
    for name, child in list(model.named_children()):
        fused = _fused_mlp(child, verify) or _fused_norm(child, verify)
        if fused is not None:
            setattr(model, name, fused)
            continue
        if all(isinstance(getattr(child, part, None), nn.Linear) for part in ("q_proj", "k_proj", "v_proj")):
            parts = ("q_proj", "k_proj", "v_proj")
            group = _ProjectionGroup([getattr(child, part) for part in parts])
            for index, part in enumerate(parts):
                setattr(child, part, SharedProjection(group, index))
        fuse(child, verify)


def _fused_mlp(module: Any, verify: bool) -> FusedMLP | None:
    if not all(isinstance(getattr(module, part, None), nn.Linear) for part in ("gate_proj", "up_proj", "down_proj")):
        return None
    if not callable(getattr(module, "act_fn", None)):
        return None
    fused = FusedMLP(module)
    return fused if not verify or _same(module, fused, module.gate_proj.in_features, module.gate_proj.weight) else None


def _fused_norm(module: Any, verify: bool) -> RMSNorm | None:
    weight = getattr(module, "weight", None)
    if not type(module).__name__.endswith("RMSNorm") or not isinstance(weight, Tensor) or weight.dim() != 1:
        return None
    fused = RMSNorm(weight.data, float(getattr(module, "variance_epsilon", getattr(module, "eps", 1e-6))))
    return fused if not verify or _same(module, fused, weight.shape[0], weight) else None


def _same(module: nn.Module, fused: nn.Module, size: int, like: Tensor) -> bool:
    probe = torch.linspace(-2, 2, 2 * size, dtype=torch.float32).view(1, 2, size).to(like.device, like.dtype)
    tolerance = 1e-5 if like.dtype == torch.float32 else 2e-2
    return torch.allclose(module(probe), fused(probe), rtol=tolerance, atol=tolerance)
