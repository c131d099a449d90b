"""What all drafter networks have in common: their shape, and embedding and head that may be the target's.

Networks are plain modules, shared by serving and training. They do not know where keys and values live
(:mod:`trimtab.drafters.layers`).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from trimtab.drafters.layers import Attend, DecoderLayer, Rotary


@dataclass(frozen=True, slots=True)
class DraftShape:
    """Architecture of a drafter, normalised over all checkpoint formats.

    Attributes:
        kind: "eagle3", "eagle", "mtp", "dflash" or "dspark".
        taps: target hidden states it reads, as indices into ``hidden_states``.
        target_hidden_size: width of one tap.
        draft_vocab_size: rows of the head; equal to ``vocab_size`` without a reduced vocabulary.
        block_size: rows of one block (block kinds).
        from_anchor: row k predicts position k + 1 (DSpark) rather than its own (DFlash).
        markov: "" (none), "vanilla", "gated" or "rnn".
        conv_kernel_size, selector_rank: 0 without the convolution or the candidate selector of DFlash2.
    """

    kind: str
    vocab_size: int
    draft_vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    taps: tuple[int, ...]
    target_hidden_size: int
    num_positions: int
    max_position: int
    qk_norm: bool = False
    attention_bias: bool = False
    # block kinds
    block_size: int = 0
    mask_token_id: int = 0
    from_anchor: bool = False
    causal: bool = False
    markov: str = ""
    markov_rank: int = 0
    confidence: bool = False
    confidence_with_markov: bool = False
    confidence_temperatures: tuple[float, ...] = ()
    conv_kernel_size: int = 0
    conv_group_size: int = 0
    selector_rank: int = 0
    selector_top_k: int = 0
    # EAGLE-3
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    # EAGLE and MTP
    fc_bias: bool = False
    hidden_first: bool = False
    num_modules: int = 1
    own_heads: bool = False


def decoder_layer(shape: DraftShape, *, has_input_norm: bool = True, input_size: int | None = None) -> DecoderLayer:
    """One layer of the drafter's own transformer."""
    return DecoderLayer(
        shape.hidden_size,
        shape.intermediate_size,
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_dim,
        shape.rms_norm_eps,
        qk_norm=shape.qk_norm,
        bias=shape.attention_bias,
        has_input_norm=has_input_norm,
        input_size=input_size,
    )


class DraftNetwork(nn.Module):
    """Base of all kinds: owns embedding and head if the checkpoint brings them, else borrows the target's."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.shape = shape
        self.rotary = Rotary(shape.head_dim, shape.rope_theta)
        self.embed_tokens: nn.Module | None = None
        self.lm_head: nn.Module | None = None

    def embed(self, token_ids: Tensor) -> Tensor:
        assert self.embed_tokens is not None
        output: Tensor = self.embed_tokens(token_ids)
        return output

    def logits(self, hidden: Tensor) -> Tensor:
        """``[T, draft_vocab_size]`` draft logits from the hidden states that the network hands to its head."""
        assert self.lm_head is not None
        output: Tensor = self.lm_head(hidden)
        return output


class AutoregressiveNetwork(DraftNetwork):
    """A network that predicts one position per pass: from the next token and a state, which is the target's at
    committed positions and its own beyond them."""

    def fuse(self, features: Tensor) -> Tensor:
        """Target features ``[T, num_taps * target_hidden_size]`` to states ``[T, hidden_size]``."""
        return features

    def advance(self, token_ids: Tensor, states: Tensor, positions: Tensor, attend: Attend, step: int) -> Tensor:
        """``[T, hidden_size]`` hidden states from the token after each position and the state at it.

        Args:
            step: draft position, for networks that have a module for each.
        """
        raise NotImplementedError

    def recycle(self, hidden: Tensor) -> Tensor:
        """The state that the next draft position starts from."""
        return hidden

    def head_input(self, hidden: Tensor) -> Tensor:
        """What `logits` is applied to."""
        return hidden
