"""MTP: the multi-token-prediction modules that DeepSeek, GLM, Qwen and MiMo targets carry."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from trimtab.drafters.layers import Attend, RMSNorm
from trimtab.drafters.networks import AutoregressiveNetwork, DraftShape, decoder_layer


class MtpModule(nn.Module):
    """Two norms, a projection of their concatenation, a decoder layer, and a norm before the head."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.hidden_first = shape.hidden_first
        self.enorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.hnorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * shape.hidden_size, shape.hidden_size, bias=False)
        self.layer = decoder_layer(shape)
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def combine(self, embedded: Tensor, states: Tensor) -> Tensor:
        """``[T, hidden_size]`` from embeddings and states; MiMo puts the state first."""
        parts = [self.enorm(embedded), self.hnorm(states)]
        output: Tensor = self.eh_proj(torch.cat(parts[::-1] if self.hidden_first else parts, dim=-1))
        return output


class MtpNetwork(AutoregressiveNetwork):
    """Draft position k uses module ``k mod num_modules``; what its norm returns is read by the head and recycled."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__(shape)
        self.mtp_layers = nn.ModuleList([MtpModule(shape) for _ in range(shape.num_modules)])

    def advance(self, token_ids: Tensor, states: Tensor, positions: Tensor, attend: Attend, step: int) -> Tensor:
        index = step % self.shape.num_modules
        module: Any = self.mtp_layers[index]
        combined = module.combine(self.embed(token_ids), states)
        output: Tensor = module.norm(module.layer(combined, self.rotary(positions), attend, index))
        return output
