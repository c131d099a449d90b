"""DSpark: a DFlash backbone whose rows learn of each other's tokens through a low-rank Markov head, and a head that
estimates the chance of acceptance. Row k predicts the token after its own position, so the anchor row predicts too.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trimtab.drafters.base import DraftSampler
from trimtab.drafters.dflash import BlockNetwork, DFlashDrafter
from trimtab.drafters.networks import DraftShape


class MarkovHead(nn.Module):
    """Logit bias from the token before: vanilla ``W2 W1[x]``, gated by the hidden state, or rnn (a state per block).

    `latent` returns what ``markov_w2`` is applied to, so that training can fuse it with the head.
    """

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        rank = shape.markov_rank
        self.variant = shape.markov
        self.markov_w1 = nn.Embedding(shape.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, shape.draft_vocab_size, bias=False)
        if self.variant == "gated":
            self.gate_proj = nn.Linear(shape.hidden_size + rank, rank)
        elif self.variant == "rnn":
            self.joint_proj = nn.Linear(2 * rank + shape.hidden_size, 3 * rank)

    def latent(self, previous: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """One draft position.

        Args:
            previous: ``[R, rank]`` rows of ``markov_w1`` of the tokens before.
            hidden: ``[R, hidden_size]`` backbone output.
            state: ``[R, rank]`` recurrent state of the block, None at its first position.

        Returns:
            ``[R, rank]`` input of ``markov_w2`` and the new state.
        """
        if self.variant == "vanilla":
            return previous, None
        if self.variant == "gated":
            return previous * torch.sigmoid(self.gate_proj(torch.cat([hidden, previous], dim=-1))), None
        state = torch.zeros_like(previous) if state is None else state
        joint = self.joint_proj(torch.cat([state, previous, hidden], dim=-1))
        gate, candidate, output = joint.chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        return torch.tanh(output), gate * state + (1 - gate) * torch.tanh(candidate)


class ConfidenceHead(nn.Module):
    """Logit that the target accepts the slot: linear in the hidden state (and the previous token's embedding)."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.proj = nn.Linear(shape.hidden_size + (shape.markov_rank if shape.confidence_with_markov else 0), 1)

    def forward(self, hidden: Tensor, previous: Tensor | None) -> Tensor:
        """``[..., hidden_size]`` (and ``[..., rank]``) to ``[...]``."""
        features = hidden if previous is None else torch.cat([hidden, previous], dim=-1)
        logits: Tensor = self.proj(features).squeeze(-1)
        return logits


class DSparkNetwork(BlockNetwork):
    """Block backbone with a Markov head and a confidence head; either may be absent."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__(shape)
        self.markov_head = MarkovHead(shape) if shape.markov else None
        self.confidence_head = ConfidenceHead(shape) if shape.confidence else None

    def latents(self, hidden: Tensor, token_ids: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Markov inputs and embeddings ``[R, K, rank]`` of whole drafts whose tokens are known (training).

        Args:
            hidden: ``[R, K, hidden_size]``; ``token_ids``: ``[R, K]`` the token before each prediction.
        """
        if self.markov_head is None:
            return None, None
        previous, state, latents = self.markov_head.markov_w1(token_ids), None, []
        for k in range(hidden.shape[1]):
            latent, state = self.markov_head.latent(previous[:, k], hidden[:, k], state)
            latents.append(latent)
        return torch.stack(latents, dim=1), previous

    def confidence(self, hidden: Tensor, previous: Tensor | None) -> Tensor | None:
        """Confidence logits ``[...]`` of slots with ``hidden [..., hidden_size]``."""
        if self.confidence_head is None:
            return None
        output: Tensor = self.confidence_head(hidden, previous if self.shape.confidence_with_markov else None)
        return output


class DSparkDrafter(DFlashDrafter):
    """Serves a DSpark network: backbone and head once per block, the Markov head once per position."""

    network: DSparkNetwork

    @property
    def has_confidence_head(self) -> bool:
        return self.network.shape.confidence

    @property
    def confidence_temperatures(self) -> list[float] | None:
        """``[K]`` temperatures to start the head's calibration from, if the checkpoint was calibrated."""
        values = list(self.network.shape.confidence_temperatures[: self.num_positions])
        return values if len(values) == self.num_positions else None

    def draw(self, hidden: Tensor, anchors: Tensor, sampler: DraftSampler) -> None:
        depth = min(sampler.depth, self.num_positions)
        logits = self.network.logits(hidden[:, :depth].flatten(0, 1)).view(len(hidden), depth, -1)
        head, tokens, state = self.network.markov_head, anchors, None
        for k in range(depth):
            row, previous = logits[:, k], None
            if head is not None:
                previous = head.markov_w1(tokens)
                latent, state = head.latent(previous, hidden[:, k], state)
                row = row + head.markov_w2(latent)
            confidence = self.network.confidence(hidden[:, k], previous)
            tokens = sampler.sample(row, k, confidence)
