"""EAGLE: the target's last hidden state and the next token's embedding, through one decoder layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trimtab.drafters.layers import Attend
from trimtab.drafters.networks import AutoregressiveNetwork, DraftShape, decoder_layer


class EagleNetwork(AutoregressiveNetwork):
    """``fc[embedding; state]``, layers of which the first has no input norm, the target's head, no norm before it."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__(shape)
        self.fc = nn.Linear(shape.hidden_size + shape.target_hidden_size, shape.hidden_size, bias=shape.fc_bias)
        self.layers = nn.ModuleList([decoder_layer(shape, has_input_norm=i > 0) for i in range(shape.num_layers)])

    def advance(self, token_ids: Tensor, states: Tensor, positions: Tensor, attend: Attend, step: int) -> Tensor:
        hidden: Tensor = self.fc(torch.cat([self.embed(token_ids), states], dim=-1))
        rotation = self.rotary(positions)
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, rotation, attend, index)
        return hidden
