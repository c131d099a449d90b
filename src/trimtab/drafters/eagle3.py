"""EAGLE-3: three fused taps of the target beside the next token's embedding; then its own hidden states."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from trimtab.drafters.layers import Attend, RMSNorm
from trimtab.drafters.networks import AutoregressiveNetwork, DraftShape, decoder_layer


class Eagle3Network(AutoregressiveNetwork):
    """The first layer attends from ``[norm(embedding); norm(state)]``; the head reads a norm of the last layer.

    Args:
        shape: `norm_before_fc` normalises all taps at once before they are fused, `fc_norm` each one,
            `norm_before_residual` lets the residual carry the normalised state, `norm_output` recycles what the head
            reads instead of what stands before its norm.
    """

    def __init__(self, shape: DraftShape) -> None:
        super().__init__(shape)
        width, eps = len(shape.taps) * shape.target_hidden_size, shape.rms_norm_eps
        self.fc = nn.Linear(width, shape.hidden_size, bias=False)
        first = decoder_layer(shape, input_size=2 * shape.hidden_size)
        first.hidden_norm = RMSNorm(shape.hidden_size, eps)
        self.layers = nn.ModuleList([first, *(decoder_layer(shape) for _ in range(shape.num_layers - 1))])
        self.norm = RMSNorm(shape.hidden_size, eps)
        self.input_norm = RMSNorm(width, eps) if shape.norm_before_fc else None
        self.fc_norm = (
            nn.ModuleList([RMSNorm(shape.target_hidden_size, eps) for _ in shape.taps]) if shape.fc_norm else None
        )

    def fuse(self, features: Tensor) -> Tensor:
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norm is not None:
            parts = torch.split(features, self.shape.target_hidden_size, dim=-1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        fused: Tensor = self.fc(features)
        return fused

    def advance(self, token_ids: Tensor, states: Tensor, positions: Tensor, attend: Attend, step: int) -> Tensor:
        rotation = self.rotary(positions)
        first: Any = self.layers[0]
        normed = first.hidden_norm(states)
        both = torch.cat([first.input_layernorm(self.embed(token_ids)), normed], dim=-1)
        residual = normed if self.shape.norm_before_residual else states
        hidden: Tensor = first.finish(residual, both, rotation, attend, 0)
        for index, layer in enumerate(self.layers[1:], start=1):
            hidden = layer(hidden, rotation, attend, index)
        return hidden

    def recycle(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.norm(hidden) if self.shape.norm_output else hidden
        return output

    def head_input(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.norm(hidden)
        return output
