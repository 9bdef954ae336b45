# SPDX-License-Identifier: Apache-2.0
"""GPTConfig: the sizes of a model, and the numbers of its parameters and FLOPs by arithmetic.

Nothing here allocates: the parameters and the FLOPs of a 405B model are a few multiplications.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from shardwise.words import bound_problems, choice_problems, type_problems

Recompute = Literal["auto", "none", "pointwise", "block"]
Score = Literal["softmax", "sigmoid"]
ExpertActivation = Literal["swiglu", "clamped_swiglu", "clamped_quick_geglu", "squared_relu"]


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3.1's stretch of the rotary frequencies.

    Args:
        factor: stretch of waves longer than ``original_context / low_frequency_factor`` tokens.
        low_frequency_factor: see ``factor``.
        high_frequency_factor: waves shorter than ``original_context / high_frequency_factor``
            tokens stay unchanged; waves between the two are interpolated.
        original_context: the context before the stretch.
    """

    factor: float = 8.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_context: int = 8192

    def __post_init__(self) -> None:
        if not (self.factor >= 1 and self.original_context > 0):
            raise ValueError(
                f"{self} cannot work: factor is at least 1 and original_context positive"
            )
        if not 0 < self.low_frequency_factor < self.high_frequency_factor:
            raise ValueError(
                f"{self} cannot work: low_frequency_factor must be positive and below "
                f"high_frequency_factor"
            )


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """A decoder of ``num_layers`` blocks: attention, then a SwiGLU feed-forward or its experts.

    Args:
        vocab_size: number of different tokens.
        dim: width of the residual stream.
        num_layers: number of blocks.
        num_heads: number of query heads.
        num_kv_heads: number of key and value heads, each shared by as many query heads.
            ``None``: ``num_heads``.
        head_dim: width of a head. ``None``: ``dim / num_heads``.
        hidden_dim: width of the feed-forward. ``None``: 8/3 ``dim``, rounded up to a multiple of
            32, which costs as much as a 4 ``dim`` feed-forward without a gate.
        context: length of the longest sequence.
        rope_theta: base of the rotary frequencies.
        rope_scaling: stretch of the rotary frequencies for a longer context.
        norm_eps: added to the mean square in every RMSNorm.
        qk_norm: whether queries and keys are normed, head by head, before they are rotated.
        tied: whether the head uses the embedding's weight.
        head_z_coefficient: weight of a term of the training loss that keeps the head's logits
            from drifting: the squared logarithm of the softmax's denominator. The losses of
            training steps contain this term, the held-out loss does not.
        recompute: ``"block"`` keeps only the inputs of blocks and computes the rest again in
            backward (activation checkpointing); ``"pointwise"`` lets compiled blocks compute norms
            and gated products again (in gpt_1b: a fortieth more time, a sixth less memory);
            ``"none"`` keeps all activations; ``"auto"``: the trainer chooses; elsewhere as
            ``"none"``.
        num_experts: number of experts of a feed-forward; 0: a dense model.
        experts_per_token: number of experts that compute a token.
        expert_hidden_dim: width of one expert. ``None``: ``hidden_width / experts_per_token``, so
            that a token costs as much as in the dense model.
        shared_hidden_dim: width of a feed-forward beside the experts, for all tokens; 0: none.
        num_dense_layers: number of layers without experts, at the begin of the model.
        expert_score: function from a router's logits to scores.
        normalise_scores: whether the scores of a token's experts are scaled to sum to 1.
        balance_coefficient: weight of the load-balance term in the training loss.
        z_coefficient: weight of the term that keeps a router's logits small.
        bias_rate: change per step of the bias that makes busy experts less likely; 0: no bias.
        expert_groups: number of equal parts of the experts. A token's experts lie in few groups. If
            a group holds the experts of one node, groups limit the number of nodes for a token.
        groups_per_token: number of groups in which a token's experts may lie.
        sequence_balance_coefficient: weight of a load-balance term of each sequence.
        expert_scale: factor of the experts' output.
        expert_activation: activation of the experts; clamped activations have the constants of
            gpt-oss, and ``squared_relu`` has no gate.
        expert_biases: whether the experts' products have biases.
        expert_layout: ``grouped`` stores a product's weights as one stacked parameter, ``indexed``
            as one for each expert.
        gate_up_block: 0: gate and up are stacked in an expert's first weight; else the size of the
            blocks in which they alternate.
        delay_expert_gradients: for experts that are spread over ranks: whether the trainer
            computes their weight gradients while gradients of rows are sent.
    """

    vocab_size: int = 257
    dim: int = 128
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int | None = None
    head_dim: int | None = None
    hidden_dim: int | None = None
    context: int = 128
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    qk_norm: bool = True
    tied: bool = False
    head_z_coefficient: float = 0.0
    recompute: Recompute = "none"
    num_experts: int = 0
    experts_per_token: int = 2
    expert_hidden_dim: int | None = None
    shared_hidden_dim: int = 0
    num_dense_layers: int = 0
    expert_score: Score = "softmax"
    normalise_scores: bool = True
    balance_coefficient: float = 0.01
    z_coefficient: float = 0.0
    bias_rate: float = 0.0
    expert_groups: int = 1
    groups_per_token: int = 1
    sequence_balance_coefficient: float = 0.0
    expert_scale: float = 1.0
    expert_activation: ExpertActivation = "swiglu"
    expert_biases: bool = False
    expert_layout: Literal["grouped", "indexed"] = "grouped"
    gate_up_block: int = 0
    delay_expert_gradients: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.rope_scaling, Mapping):  # read from JSON
            object.__setattr__(self, "rope_scaling", RopeScaling(**self.rope_scaling))
        problems = type_problems(self) or self._problems()
        if problems:
            raise ValueError("GPTConfig cannot work: " + "; ".join(problems))

    # --------------------------------------------------------------------------- values for None

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_width(self) -> int:
        return self.dim // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def hidden_width(self) -> int:
        if self.hidden_dim is not None:
            return self.hidden_dim
        return _up_to_multiple(-(-8 * self.dim // 3), 32)

    @property
    def expert_width(self) -> int:
        if self.expert_hidden_dim is not None:
            return self.expert_hidden_dim
        return _up_to_multiple(-(-self.hidden_width // self.experts_per_token), 32)

    # ------------------------------------------------------------------------------------- counting

    @property
    def num_parameters(self) -> int:
        """The number of all parameters: ``sum(p.numel() for p in GPT(config).parameters())``."""
        return self._parameters(experts=self.num_experts)

    @property
    def num_active_parameters(self) -> int:
        """The number of parameters that one token uses: of the experts, only its own."""
        return self._parameters(experts=min(self.experts_per_token, self.num_experts))

    def _parameters(self, *, experts: int) -> int:
        heads = self.head_width if self.qk_norm else 0
        vectors = self.num_layers * (2 * self.dim + 2 * heads) + self.dim
        if self.expert_biases:
            each = (self._matrices_of_an_expert - 1) * self.expert_width + self.dim
            vectors += self.num_mixed_layers * experts * each
        tables = self.vocab_size * self.dim * (1 if self.tied else 2)
        return self._matrix_parameters(experts) + vectors + tables

    def _matrix_parameters(self, experts: int) -> int:
        """The number of parameters in the matrices of all blocks."""
        attention = 2 * self.dim * (self.num_heads + self.kv_heads) * self.head_width
        mixed = self.num_mixed_layers
        dense = 3 * self.dim * self.hidden_width
        width = self._matrices_of_an_expert * experts * self.expert_width
        mixture = self.dim * (self.num_experts + width + 3 * self.shared_hidden_dim)
        return self.num_layers * attention + (self.num_layers - mixed) * dense + mixed * mixture

    @property
    def num_mixed_layers(self) -> int:
        """The number of layers with experts."""
        return self.num_layers - self.num_dense_layers if self.num_experts else 0

    @property
    def _matrices_of_an_expert(self) -> int:
        return 2 if self.expert_activation == "squared_relu" else 3  # no gate

    def has_experts(self, layer: int) -> bool:
        return self.num_experts > 0 and layer >= self.num_dense_layers

    def flops_per_token(self, context: int | None = None) -> int:
        """FLOPs of forward and backward for one token of a sequence of ``context`` tokens.

        A multiply-add counts 2; backward counts twice as much as forward. Attention is causal, so a
        token reads (context + 1) / 2 keys on average. The embedding lookup counts 0. Recomputation
        is not counted: MFU measures the necessary work.
        """
        context = self.context if context is None else context
        matrices = self._matrix_parameters(min(self.experts_per_token, self.num_experts))
        head = self.vocab_size * self.dim
        # Scores and mixed values: 2 multiply-adds for every channel and key, for half of the keys.
        attention = self.num_layers * 2 * self.num_heads * self.head_width * (context + 1)
        return 3 * (2 * (matrices + head) + attention)

    # ---------------------------------------------------------------------------------- invariants

    def _problems(self) -> list[str]:
        sizes = ["vocab_size", "dim", "num_layers", "num_heads", "num_kv_heads", "head_dim"]
        sizes += ["hidden_dim", "context", "experts_per_token", "expert_hidden_dim"]
        sizes += ["expert_groups", "groups_per_token"]
        problems = bound_problems(self, 1, *sizes, whole=True)
        counts = ("num_experts", "shared_hidden_dim", "num_dense_layers", "gate_up_block")
        problems += bound_problems(self, 0, *counts, whole=True)
        factors = ("rope_theta", "norm_eps", "expert_scale")
        problems += bound_problems(self, 0, *factors, above=True)
        terms = ("balance_coefficient", "sequence_balance_coefficient", "z_coefficient")
        problems += bound_problems(self, 0, *terms, "head_z_coefficient", "bias_rate")
        problems += choice_problems(self)
        if problems:  # the checks below divide by these numbers
            return problems
        if self.head_dim is None and self.dim % self.num_heads:
            problems.append(
                f"dim={self.dim} is no multiple of num_heads={self.num_heads}: change one of them, "
                f"or set head_dim"
            )
        elif self.head_width % 2:
            problems.append(f"a head of width {self.head_width} cannot be rotated: make it even")
        if self.num_heads % self.kv_heads:
            problems.append(
                f"num_heads={self.num_heads} is no multiple of num_kv_heads={self.kv_heads}: "
                f"change one of them"
            )
        if not self.num_experts and (self.shared_hidden_dim or self.num_dense_layers):
            problems.append(
                f"shared_hidden_dim={self.shared_hidden_dim} and num_dense_layers="
                f"{self.num_dense_layers} need a model with experts: leave both at 0"
            )
        if self.num_dense_layers >= self.num_layers and self.num_experts:
            problems.append(
                f"num_dense_layers={self.num_dense_layers} of num_layers={self.num_layers} leave "
                f"no layer for the experts: lower num_dense_layers, or set num_experts=0"
            )
        if 0 < self.num_experts < self.experts_per_token:
            problems.append(
                f"experts_per_token={self.experts_per_token} of num_experts={self.num_experts}: "
                f"lower experts_per_token or raise num_experts"
            )
        return problems


def _up_to_multiple(value: int, of: int) -> int:
    return -(-value // of) * of
