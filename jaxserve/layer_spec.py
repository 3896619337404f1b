"""What a decoder layer is: how it mixes tokens, and its feed-forward part, as small frozen dataclasses.

Layers with equal specs share one compiled program; the layers of one model may differ. Letters as in docs/shapes.md.
"""

from dataclasses import dataclass
from typing import Literal

from jaxserve.rope import RopeConfig


@dataclass(frozen=True)
class Attention:
    """Grouped-query attention over pages of keys and values."""

    heads: int  # H
    kv_heads: int  # K
    head_dim: int  # D
    rope: RopeConfig
    window: int | None = None
    """Tokens a query sees, itself included; None sees all."""
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    """Queries and keys pass an RMS norm a head."""
    scale: float | None = None
    """Scores are multiplied by it; 1 / sqrt(D) by default."""
    softcap: float | None = None
    """Scores become ``softcap * tanh(score / softcap)``."""
    sinks: bool = False
    """Every head has a learned score that takes part in the softmax and mixes in nothing."""
    v_norm: bool = False
    """Values pass an RMS norm a head that has no weight."""
    v_is_k: bool = False
    """Values are the keys as they were before norm and rope."""
    borrows: bool = False
    """The layer has no keys and values of its own, but those of the last layer before it that has, of equal window."""

    @property
    def own(self) -> int:
        """How many of keys and values are made from weights of their own."""
        return 0 if self.borrows else 1 if self.v_is_k else 2


@dataclass(frozen=True)
class Indexer:
    """Chooses which earlier tokens latent attention looks at (DeepSeek V3.2's lightning indexer).

    A token's score is ``sum_h w_h * relu(q_h . k) / sqrt(dim)``; the ``top_k`` best are attended to.
    """

    heads: int
    dim: int
    top_k: int
    pairs: bool = False
    """Rope turns channels 2i and 2i + 1 together, not i and i + dim / 2."""
    eps: float = 1e-6
    """Of the norm over keys."""


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek V2): keys and values of all heads are made from one latent a token."""

    heads: int  # H
    rank: int  # R
    nope: int
    """Channels of a query or key that are not rotated; ``rope.dim`` follow that are."""
    value: int
    """Channels of a value."""
    rope: RopeConfig
    scale: float
    """Scores are multiplied by it."""
    q_rank: int | None = None
    """Queries are made from a latent too, of this size."""
    pairs: bool = True
    """Rope turns channels 2i and 2i + 1 together, not i and i + dim / 2."""
    eps: float = 1e-6
    """Of the norms over latents."""
    bias: bool = False
    """What makes latents has a bias, and so has the output."""
    indexer: Indexer | None = None
    """Chooses what is attended to; None: everything is."""
    takes_choice: bool = False
    """It attends to what the last layer before it that has an indexer has chosen."""

    @property
    def sparse(self) -> bool:
        """Whether it attends to chosen tokens."""
        return self.indexer is not None or self.takes_choice

    @property
    def kv_heads(self) -> int:
        return self.heads


Mixer = Attention | Latent


@dataclass(frozen=True)
class Activation:
    """How a gated feed-forward network joins its two halves: ``kind(gate) * up``; ``swish_up_one`` is
    ``gate * sigmoid(alpha * gate) * (up + 1)``."""

    kind: Literal["silu", "gelu_tanh", "swish_up_one"] = "silu"
    limit: float | None = None
    """The gate is at most this, and up between its negative and it."""
    alpha: float = 1.0


@dataclass(frozen=True)
class Dense:
    """A gated feed-forward network of ``width`` F."""

    width: int
    activation: Activation = Activation()
    bias: bool = False


@dataclass(frozen=True)
class Router:
    """How a token chooses its experts. All of it is computed in float32.

    The logits become scores by ``score``; a token takes the ``top_k`` experts of highest score plus correction bias,
    weighted by their scores. ``chosen_softmax`` chooses by logits and takes the softmax over the chosen alone.
    """

    score: Literal["softmax", "chosen_softmax", "sigmoid", "sqrt_softplus"]
    top_k: int
    renormalize: bool = False
    """The weights of the chosen are divided by their sum."""
    scale: float = 1.0
    """The weights are multiplied by it."""
    bias: bool = False
    """The logits have a bias."""
    correction: bool = False
    """A bias is added to the scores for choosing, and not for weighting."""
    groups: int = 1
    """Experts are divided into groups, and only those of the ``top_groups`` best may be chosen."""
    top_groups: int = 1
    group_score: Literal["top2", "max"] = "top2"
    """A group is as good as the sum of its two best experts, or as its best one."""
    expert_scale: bool = False
    """The weight of every expert is multiplied by a number of its own."""


@dataclass(frozen=True)
class Moe:
    """A mixture of ``experts`` X gated networks of ``width`` F; every token passes through some, and all the shared."""

    experts: int
    width: int
    router: Router
    activation: Activation = Activation()
    bias: bool = False
    mxfp4: bool = False
    """The experts' matrices are MXFP4."""
    shared: Dense | None = None
    """A network that every token passes through; several shared experts are one wide network."""
    gated: bool = False
    """What the shared network brings is weighted by the sigmoid of a product with each row (Qwen2)."""
    beside: Dense | None = None
    """A network that every token passes through beside the mixture (Gemma 4): both have norms of their own before and
    after, and the router one without weight."""


@dataclass(frozen=True)
class PerLayer:
    """An embedding of the token for this layer alone (Gemma 4), gated by what the layer has made: ``width`` channels,
    out of a table of ``vocab`` rows and out of the embedding that all layers begin with."""

    width: int
    vocab: int
    activation: Activation


@dataclass(frozen=True)
class LayerSpec:
    """What distinguishes one decoder layer from the next."""

    mixer: Mixer
    ffn: Dense | Moe
    sandwich: bool = False
    """What attention and feed-forward part bring passes a norm of its own before it is added."""
    per_layer: PerLayer | None = None
    scaled: bool = False
    """What leaves the layer is multiplied by a number of its own."""
