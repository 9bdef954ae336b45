# SPDX-License-Identifier: Apache-2.0
"""GPT: the reference model, a modern decoder with dense or expert feed-forwards.

    tokens -> embedding -> block x num_layers -> norm -> head -> logits
                             |
             hidden += attention(norm(hidden)), then hidden += feed_forward(norm(hidden))

RMSNorm before each part and on queries and keys, rotary positions, grouped key and value heads,
SwiGLU. Sizes in the comments: B sequences of T tokens, C = dim, H query heads and K key heads of
width D, F hidden, V words.

The model contains no code for sharding. The caller wraps each entry of ``blocks`` as a unit, then
the model, whose unit has the embedding, the last norm and the head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwise.models.gpt_config import GPTConfig, RopeScaling
from shardwise.models.layers import (
    Call,
    Mask,
    RMSNorm,
    Rotary,
    attend,
    call_again,
    call_once,
    documents_mask,
    norm_again,
    rotate,
)
from shardwise.models.loss import IGNORED, Softmax, linear_cross_entropy, softmax_and_gradient
from shardwise.moe import (
    MixtureOfExperts,
    Routing,
    clamped_quick_geglu,
    clamped_swiglu,
    mixtures_of,
    squared_relu,
    swiglu,
)
from shardwise.precision.fp8_swiglu import swiglu_mlp

__all__ = ["GPT", "IGNORED", "Block", "GPTConfig", "RopeScaling", "generate"]


class Attention(nn.Module):
    """Causal attention. H/K query heads share one key and value head."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = self.head_width = config.head_width
        self.wq = nn.Linear(config.dim, config.num_heads * width, bias=False)
        self.wk = nn.Linear(config.dim, config.kv_heads * width, bias=False)
        self.wv = nn.Linear(config.dim, config.kv_heads * width, bias=False)
        self.wo = nn.Linear(config.num_heads * width, config.dim, bias=False)
        self.q_norm = RMSNorm(width, eps=config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(width, eps=config.norm_eps) if config.qk_norm else nn.Identity()

    def forward(
        self,
        hidden: Tensor,
        rotary: Tensor,
        mask: Mask | None = None,
    ) -> Tensor:
        q = self.wq(hidden).unflatten(-1, (-1, self.head_width))  # [B, T, H, D]
        k = self.wk(hidden).unflatten(-1, (-1, self.head_width))  # [B, T, K, D]
        v = self.wv(hidden).unflatten(-1, (-1, self.head_width))  # [B, T, K, D]
        q, k = rotate(self.q_norm(q), rotary), rotate(self.k_norm(k), rotary)
        mixed = attend(q, k, v, mask)  # [B, T, H, D]
        return self.wo(mixed.flatten(2))  # type: ignore[no-any-return]  # [B, T, C]


class FeedForward(nn.Module):
    """SwiGLU: one projection gates the other. ``call`` computes the product of the two."""

    def __init__(self, dim: int, width: int, call: Call = call_once) -> None:
        super().__init__()
        self.call = call
        self.gate = nn.Linear(dim, width, bias=False)
        self.up = nn.Linear(dim, width, bias=False)
        self.down = nn.Linear(width, dim, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return swiglu_mlp(hidden, self.gate, self.up, self.down, call=self.call)


def pointwise_call(config: GPTConfig) -> Call:
    """The function with which a block calls its gated products."""
    return call_again if config.recompute == "pointwise" else call_once


def mixture(config: GPTConfig) -> MixtureOfExperts:
    """The experts of a block, with a shared feed-forward for all tokens if the config has one."""
    routing = Routing(
        num_experts=config.num_experts,
        experts_per_token=config.experts_per_token,
        score=config.expert_score,
        normalise=config.normalise_scores,
        balance_loss=config.balance_coefficient,
        z_loss=config.z_coefficient,
        bias_rate=config.bias_rate,
        groups=config.expert_groups,
        groups_per_token=config.groups_per_token,
        sequence_loss=config.sequence_balance_coefficient,
        scale=config.expert_scale,
    )
    width = config.shared_hidden_dim
    shared = FeedForward(config.dim, width, pointwise_call(config)) if width else None
    return MixtureOfExperts(
        routing,
        config.dim,
        config.expert_width,
        activation=_ACTIVATIONS[config.expert_activation],
        shared=shared,
        bias=config.expert_biases,
        weight_layout=config.expert_layout,
        gate_up_block=config.gate_up_block,
    )


_ACTIVATIONS = {
    "swiglu": swiglu(),
    "clamped_swiglu": clamped_swiglu(limit=7.0),
    "clamped_quick_geglu": clamped_quick_geglu(alpha=1.702, limit=7.0, offset=1.0),
    "squared_relu": squared_relu(),
}


class Block(nn.Module):
    """One layer; returns the hidden states and the loss term of its experts, if it has any."""

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.feed_forward_norm = RMSNorm(config.dim, eps=config.norm_eps)
        self.feed_forward: nn.Module = (
            mixture(config)
            if config.has_experts(layer)
            else FeedForward(config.dim, config.hidden_width, pointwise_call(config))
        )
        self.call_norm = norm_again if config.recompute == "pointwise" else call_once

    def forward(
        self,
        hidden: Tensor,
        rotary: Tensor,
        mask: Mask | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        hidden, normed = self.attend(hidden, rotary, mask)
        if isinstance(self.feed_forward, MixtureOfExperts):
            change, routes = self.feed_forward(normed)
            return hidden + change, routes.loss
        return hidden + self.feed_forward(normed), None

    def attend(self, hidden: Tensor, rotary: Tensor, mask: Mask | None) -> tuple[Tensor, Tensor]:
        """The hidden states after attention, and their norm for the feed-forward."""
        normed = self.call_norm(self.attention_norm, hidden)
        hidden = hidden + self.attention(normed, rotary, mask)  # [B, T, C]
        return hidden, self.call_norm(self.feed_forward_norm, hidden)

    def compile_forward(self, **options: Any) -> None:
        """Run forward through ``torch.compile``.

        Only the function is compiled, not the module: hooks of sharding still run around it, and
        the names of parameters do not change.
        """
        self.forward = torch.compile(self.forward, **options)  # type: ignore[method-assign]


class GPT(nn.Module):
    """A decoder. ``model(tokens)`` gives logits, ``model(tokens, targets)`` the loss.

    The model is built on the default device with fresh values from torch's generator. On the meta
    device (``with torch.device("meta")``) it has no values. Then ``to_empty`` and
    :meth:`init_weights`, before or after sharding, give the same values for the same seed.
    """

    auxiliary: Tensor | None  # the term that mixtures of experts added to the last loss
    softmax: Softmax | None = None  # compiled
    document_end: int | None = None  # attention begins anew after this token; None: never

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config, self.auxiliary = config, None
        self.rotary = Rotary(config)
        device = torch.get_default_device()
        with torch.device("meta"):  # torch need not draw initial values, which are overwritten
            words = torch.empty(config.vocab_size, config.dim)  # nn.Embedding draws on meta too
            self.embedding = nn.Embedding(config.vocab_size, config.dim, _weight=words)
            self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
            self.norm = RMSNorm(config.dim, eps=config.norm_eps)
            # A tied head has no module, because `to_empty` gives each module its own parameter.
            self.head = (
                None if config.tied else nn.Linear(config.dim, config.vocab_size, bias=False)
            )
        if device.type != "meta":
            self.to_empty(device=device)
            self.init_weights()

    def init_weights(self, seed: int | None = None) -> None:
        """Draw fresh values for every parameter, from ``seed`` or from torch's own generator.

        A product keeps the scale of its input: deviation 1/sqrt(inputs). Products that add to the
        residual stream are divided by sqrt(2 num_layers), so that the stream ends at the same scale
        in a deep model as in a shallow one.
        """
        device = self.embedding.weight.device
        generator = None if seed is None else torch.Generator(device).manual_seed(seed)
        depth = (2 * self.config.num_layers) ** -0.5
        mixtures = mixtures_of(self)
        # Experts may be spread over ranks: the values of an expert depend on its number.
        skipped = {
            id(parameter)
            for layer in mixtures
            for parameter in (layer.router.weight, *layer.experts.parameters())
        }
        for name, parameter in self.named_parameters():
            if id(parameter) in skipped:
                continue
            if parameter.ndim == 1:
                nn.init.ones_(parameter)
            else:
                deviation = parameter.shape[-1] ** -0.5
                if name.endswith(("wo.weight", "down.weight")):
                    deviation *= depth
                nn.init.normal_(parameter, std=deviation, generator=generator)
        for number, layer in enumerate(mixtures):
            own_seed = None if seed is None else seed * len(mixtures) + number
            layer.init_weights(own_seed, out_scale=depth)

    @property
    def recomputed(self) -> tuple[nn.Module, ...]:
        """The modules that run forward again in backward; ``sw.plan`` reads this."""
        return tuple(self.blocks) if self.config.recompute == "block" else ()

    @property
    def num_parameters(self) -> int:
        return self.config.num_parameters

    def compile(self, **options: Any) -> None:  # type: ignore[override]
        """Compile the blocks, equal blocks into one graph, and the loss; before the first forward.

        ``options``: arguments of ``torch.compile``.
        """
        options = {"dynamic": False} | options
        for block in self.blocks:
            block.compile_forward(**options)  # type: ignore[operator]
        self.softmax = torch.compile(softmax_and_gradient, **options)

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
    ) -> Tensor:
        """Logits [B, T, V]; with ``targets`` [B, T], the mean cross-entropy over scored targets.

        A target of -100 is not scored; without any scored target the loss is 0. In training mode
        mixtures of experts add the mean of their terms: load balance and z-loss.
        """
        if (length := tokens.shape[1]) > self.config.context:
            raise ValueError(
                f"{length} tokens do not fit GPTConfig(context={self.config.context}): shorten the "
                f"sequences or raise context"
            )
        mask = documents_mask(tokens, self.document_end, always=self.softmax is not None)
        hidden = self.embedding(tokens)  # [B, T, C]
        rotary = self.rotary.table(length, hidden.device, hidden.dtype)
        recompute = bool(self.recomputed) and torch.is_grad_enabled()
        terms: list[Tensor] = []
        for block in self.blocks:
            if recompute:  # there is no dropout, so no random state to keep
                hidden, term = checkpoint(
                    block, hidden, rotary, mask, use_reentrant=False, preserve_rng_state=False
                )
            else:
                hidden, term = block(hidden, rotary, mask)
            if term is not None:
                terms.append(term)
        hidden = self.norm(hidden)
        head = self.embedding.weight if self.head is None else self.head.weight
        if targets is None:
            return F.linear(hidden, head)  # [B, T, V]
        loss = linear_cross_entropy(
            hidden,
            head,
            targets,
            z_coefficient=self.config.head_z_coefficient if self.training else 0.0,
            softmax=self.softmax,
        )
        self.auxiliary = None
        if terms and self.training:
            auxiliary = torch.stack(terms).mean()
            self.auxiliary = auxiliary.detach()
            loss = loss + auxiliary
        return loss


@torch.no_grad()
def generate(
    model: nn.Module,
    tokens: Tensor,
    max_new_tokens: int,
    *,
    context: int,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
    until: Callable[[], bool] = lambda: False,
) -> Tensor:
    """``tokens`` [B, T] and ``max_new_tokens`` more, drawn one by one: [B, T + max_new_tokens].

    Each token is a forward of the last ``context`` tokens. That is enough for a sample at the end
    of a run; to write more, export the model and let transformers generate. ``temperature`` 0 takes
    the likeliest token. ``until`` is asked after each token and may end the text.

    On a sharded model all ranks call this function with the same arguments, and get the same answer
    from ``until``. Tokens are drawn on the CPU, with a CPU ``generator``: one seed gives one text
    on every device.
    """
    was_training = model.training
    model.eval()
    try:
        for _ in range(max_new_tokens):
            logits = model(tokens[:, -context:])[:, -1].float().cpu()  # [B, V]
            if temperature == 0:
                drawn = logits.argmax(-1, keepdim=True)
            else:
                chances = (logits / temperature).softmax(-1)
                drawn = torch.multinomial(chances, 1, generator=generator)
            tokens = torch.cat((tokens, drawn.to(tokens.device)), 1)
            if until():
                break
    finally:
        model.train(was_training)
    return tokens
