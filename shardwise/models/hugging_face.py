# SPDX-License-Identifier: Apache-2.0
"""Weights and configurations under the names of the Hugging Face ecosystem.

    qk_norm   num_experts   Hugging Face class
    False     0             LlamaForCausalLM
    True      0             Qwen3ForCausalLM
    True      > 0           Qwen3MoeForCausalLM, or Dots1ForCausalLM with a shared expert

Dots1ForCausalLM has the experts of DeepSeek-V3 (sigmoid scores, a bias that balances the load,
groups, a shared expert) with the attention of GPT. DeepSeek-V3 itself has a different attention.

The functions convert dictionaries to dictionaries. They read and write no files, do not need
`transformers`, and do not transpose or permute tensors. Experts are one stacked tensor in GPT, and
one tensor for each matrix in Hugging Face, which is a view of the stack:

    experts.fc1.weight [experts, gate and up, dim]     experts.3.gate_proj.weight, .up_proj.weight
    experts.fc2.weight [experts, dim, width]           experts.3.down_proj.weight
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.models.gpt_config import GPTConfig, RopeScaling
from shardwise.moe import convert_gate_up, declare_gate_up
from shardwise.words import quoted

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "dots1": "Dots1ForCausalLM",
}
_OUTER = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
_BLOCK = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.wq.weight": "self_attn.q_proj.weight",
    "attention.wk.weight": "self_attn.k_proj.weight",
    "attention.wv.weight": "self_attn.v_proj.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
    "feed_forward_norm.weight": "post_attention_layernorm.weight",
}
_QK_NORMS = {
    "attention.q_norm.weight": "self_attn.q_norm.weight",
    "attention.k_norm.weight": "self_attn.k_norm.weight",
}
_DENSE = {
    "feed_forward.gate.weight": "mlp.gate_proj.weight",
    "feed_forward.up.weight": "mlp.up_proj.weight",
    "feed_forward.down.weight": "mlp.down_proj.weight",
}
_EXPERTS = {"feed_forward.router.weight": "mlp.gate.weight"}
_SHARED = {
    "feed_forward.router.expert_bias": "mlp.gate.e_score_correction_bias",
    "feed_forward.shared.gate.weight": "mlp.shared_experts.gate_proj.weight",
    "feed_forward.shared.up.weight": "mlp.shared_experts.up_proj.weight",
    "feed_forward.shared.down.weight": "mlp.shared_experts.down_proj.weight",
}
_FC1 = "feed_forward.experts.fc1."
# The matrices of an expert in each stacked tensor.
_STACKS = {
    f"{_FC1}weight": ("gate_proj", "up_proj"),
    "feed_forward.experts.fc2.weight": ("down_proj",),
}
# The tensor of all experts, or (in checkpoints) of the expert with the number at the end.
_STACKED = re.compile(r"(.*feed_forward\.experts\.fc[12]\.weight)(\d*)")

# Options that each model type with experts supports with one value only.
_SWIGLU = {"expert_activation": "swiglu", "expert_biases": False}
_ONLY: dict[str, dict[str, Any]] = {
    "qwen3_moe": _SWIGLU
    | {"shared_hidden_dim": 0, "expert_score": "softmax", "bias_rate": 0.0}
    | {"qk_norm": True, "expert_groups": 1, "expert_scale": 1.0},
    "dots1": _SWIGLU | {"expert_score": "sigmoid", "qk_norm": True},
}


def model_type(config: GPTConfig) -> str:
    """The Hugging Face model type that computes the same; raises if there is none."""
    if not config.num_experts:
        return "qwen3" if config.qk_norm else "llama"
    kind = "dots1" if config.shared_hidden_dim or config.expert_score == "sigmoid" else "qwen3_moe"
    problems = [
        f"{name}={getattr(config, name)!r}"
        for name, only in _ONLY[kind].items()
        if getattr(config, name) != only
    ]
    width = config.expert_width
    if kind == "dots1" and not config.bias_rate:
        problems.append(f"bias_rate=0 with expert_score={config.expert_score!r}, which has a bias")
    if kind == "dots1" and (not config.shared_hidden_dim or config.shared_hidden_dim % width):
        problems.append(
            f"shared_hidden_dim={config.shared_hidden_dim} (a multiple of the experts' {width})"
        )
    if problems:
        raise ValueError(
            f"{_ARCHITECTURES[kind]} has no option for {'; '.join(problems)}: this model has no "
            f"Hugging Face form. Export it under its own names (convert=, config=)"
        )
    return kind


# ----------------------------------------------------------------------------------------- weights


@cache
def hf_names(config: GPTConfig) -> dict[str, list[str]]:
    """The Hugging Face names of each parameter of a GPT: one name, or one for each matrix of its
    experts."""
    shared = model_type(config) == "dots1"
    names = {ours: [theirs] for ours, theirs in _OUTER.items()}
    if config.tied:
        del names["head.weight"]
    for layer in range(config.num_layers):
        mixed = config.has_experts(layer)
        block = _BLOCK | (_QK_NORMS if config.qk_norm else {}) | (_EXPERTS if mixed else _DENSE)
        block |= _SHARED if mixed and shared else {}
        prefix = f"model.layers.{layer}."
        names |= {f"blocks.{layer}.{own}": [prefix + theirs] for own, theirs in block.items()}
        for own, matrices in _STACKS.items() if mixed else ():
            names[f"blocks.{layer}.{own}"] = [
                f"{prefix}mlp.experts.{expert}.{matrix}.weight"
                for expert in range(config.num_experts)
                for matrix in matrices
            ]
    return names


def hf_tensors(name: str, tensor: Tensor, config: GPTConfig) -> dict[str, Tensor]:
    """One whole parameter under its Hugging Face names, or one expert of a stack, whose number
    follows the name. Large models are converted in this way."""
    stack, parts = _STACKED.fullmatch(name), [tensor]
    names = hf_names(config).get(stack[1] if stack else name)
    if names is None:
        raise ValueError(f"{name!r} is no parameter of this GPT")
    if stack is not None:
        count = len(names) // config.num_experts  # gate and up are stacked
        if stack[2]:
            names = names[count * int(stack[2]) :][:count]
        matrices = [tensor] if stack[2] else tensor.unbind()
        parts = [part for matrix in matrices for part in matrix.chunk(count)]
    return dict(zip(names, parts, strict=True))


def to_hf(state: Mapping[str, Any], config: GPTConfig) -> dict[str, Tensor]:
    """A full state dict of ``GPT(config)`` under Hugging Face names; the tensors are views."""
    given = [name for name in state if not name.endswith("_extra_state")]  # read with its tensor
    _check_names(given, hf_names(config), "a state dict of this GPT")
    converted: dict[str, Tensor] = {}
    for name in given:
        tensor = state[name]
        if _FC1 in name:
            order = state[f"{name.removesuffix('weight')}_extra_state"]["gate_up_block"]
            tensor = convert_gate_up(tensor, order, 0, -2)
        converted |= hf_tensors(name, tensor, config)
    return converted


def from_hf(state: Mapping[str, Tensor], config: GPTConfig) -> dict[str, Any]:
    """Hugging Face weights as a state dict of ``GPT(config)``. Experts are stacked copies; all
    other tensors are shared."""
    converted: dict[str, Any] = {}
    for part in parameters_from_hf(state, config):
        converted |= part
    return converted


def parameters_from_hf(state: Mapping[str, Tensor], config: GPTConfig) -> Iterator[dict[str, Any]]:
    """:func:`from_hf` one parameter at a time, for a ``state`` that reads tensors from files."""
    # Old files contain the rotary frequencies, and some the tied head: both are not needed.
    given = [name for name in state if not name.endswith("rotary_emb.inv_freq")]
    if config.tied:
        given = [name for name in given if name != "lm_head.weight"]
    expected = [name for names in hf_names(config).values() for name in names]
    _check_names(given, expected, f"weights of a {_ARCHITECTURES[model_type(config)]}")
    for name, theirs in hf_names(config).items():
        parts = [state[key] for key in theirs]
        if _STACKED.fullmatch(name) is None:
            yield {name: parts[0]}
            continue
        count = len(parts) // config.num_experts
        matrices = [torch.cat(parts[i : i + count]) for i in range(0, len(parts), count)]
        stacked: dict[str, Any] = {name: torch.stack(matrices)}
        if _FC1 in name:
            declare_gate_up(stacked, name.removesuffix("weight"), 0)
        yield stacked


def _check_names(given: Any, expected: Any, what: str) -> None:
    missing, unknown = sorted({*expected} - {*given}), sorted({*given} - {*expected})
    if missing or unknown:
        parts = [
            f"{len(names)} {kind} ({quoted(names)})"
            for kind, names in (("missing", missing), ("not known", unknown))
            if names
        ]
        raise ValueError(
            f"these are not {what}: {' and '.join(parts)}. Use the configuration of these weights"
        )


# ---------------------------------------------------------------------------------- configurations

_NEEDED: Any = object()


class _Field(NamedTuple):
    """A value of config.json."""

    theirs: str  # its key in config.json
    ours: str  # the argument of GPTConfig
    written: str | None = None  # the property of GPTConfig that is written; None: ``ours``
    default: Any = _NEEDED  # the value if config.json does not contain the key


_FIELDS = (
    _Field("vocab_size", "vocab_size"),
    _Field("hidden_size", "dim"),
    _Field("num_hidden_layers", "num_layers"),
    _Field("num_attention_heads", "num_heads"),
    _Field("max_position_embeddings", "context"),
    _Field("num_key_value_heads", "num_kv_heads", "kv_heads", None),
    _Field("head_dim", "head_dim", "head_width", None),
    _Field("intermediate_size", "hidden_dim", "hidden_width"),
    _Field("rms_norm_eps", "norm_eps", default=1e-6),
    _Field("tie_word_embeddings", "tied", default=False),
)
_OF_EXPERTS = (
    _Field("num_experts_per_tok", "experts_per_token"),
    _Field("moe_intermediate_size", "expert_hidden_dim", "expert_width"),
    _Field("norm_topk_prob", "normalise_scores", default=False),
)
_EXPERT_FIELDS = {
    "qwen3_moe": (_Field("num_experts", "num_experts"), *_OF_EXPERTS),
    "dots1": (
        _Field("n_routed_experts", "num_experts"),
        *_OF_EXPERTS,
        _Field("routed_scaling_factor", "expert_scale", default=1.0),
        _Field("n_group", "expert_groups", default=1),
        _Field("topk_group", "groups_per_token", default=1),
        _Field("first_k_dense_replace", "num_dense_layers", default=0),
    ),
}
# The key of llama3's stretch, and the argument of RopeScaling.
_STRETCH = {
    "factor": "factor",
    "low_freq_factor": "low_frequency_factor",
    "high_freq_factor": "high_frequency_factor",
    "original_max_position_embeddings": "original_context",
}


def hf_config(
    config: GPTConfig, *, dtype: str = "float32", end_token: int | None = None
) -> dict[str, Any]:
    """The contents of ``config.json`` for the weights of :func:`to_hf`.

    Args:
        dtype: dtype in which the weights are stored, as torch spells it.
        end_token: the token that ends a text; ``generate`` of transformers stops there.
    """
    kind, scaling = model_type(config), config.rope_scaling
    if kind == "llama" and config.dim % config.num_heads:
        raise ValueError(
            f"dim={config.dim} is no multiple of num_heads={config.num_heads}, which "
            f"LlamaForCausalLM refuses: change one of them, or set qk_norm=True (Qwen3ForCausalLM)"
        )
    rope: dict[str, Any] = {"rope_type": "default"}
    if scaling is not None:
        rope = {key: getattr(scaling, name) for key, name in _STRETCH.items()}
        rope["rope_type"] = "llama3"
    fields = (*_FIELDS, *_EXPERT_FIELDS.get(kind, ()))
    values: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[kind]],
        "model_type": kind,
        **{field.theirs: getattr(config, field.written or field.ours) for field in fields},
        "hidden_act": "silu",
        "attention_bias": False,
        "bos_token_id": None,
        "eos_token_id": end_token,
        "torch_dtype": dtype,
        # transformers reads the first two keys before version 5, the third since then.
        "rope_theta": config.rope_theta,
        "rope_scaling": None if scaling is None else rope,
        "rope_parameters": {"rope_theta": config.rope_theta, **rope},
    }
    if kind == "qwen3_moe":
        dense = list(range(config.num_dense_layers))
        values |= {"decoder_sparse_step": 1, "mlp_only_layers": dense}
    elif kind == "dots1":
        values["n_shared_experts"] = config.shared_hidden_dim // config.expert_width
        values |= {"layer_types": ["full_attention"] * config.num_layers, "sliding_window": None}
    if config.num_experts:
        # Our loss counts shares of choices, theirs tokens per expert: experts_per_token times more.
        values["router_aux_loss_coef"] = config.balance_coefficient / config.experts_per_token
    return values


def config_from_hf(values: Mapping[str, Any]) -> GPTConfig:
    """The config of the GPT that a ``config.json`` describes; raises with all reasons if a GPT
    cannot compute the same."""
    kind = values.get("model_type")
    if kind == "mistral":  # Llama with a window; the window must cover the context
        kind = "llama"
    if kind not in _ARCHITECTURES:
        raise ValueError(
            f"model_type {kind!r} can't be a GPT: choose from {', '.join(_ARCHITECTURES)}, mistral"
        )
    experts = _EXPERT_FIELDS.get(kind, ())
    if experts:  # transformers renames the key from version to version
        counts = map(values.get, ("num_experts", "n_routed_experts", "num_local_experts"))
        values = {**values, experts[0].theirs: next(filter(None, counts), None)}
    arguments: dict[str, Any] = {}
    problems = []
    for field in (*_FIELDS, *experts):
        value = values.get(field.theirs)
        arguments[field.ours] = field.default if value is None else value
        if arguments[field.ours] is _NEEDED:
            problems.append(f"{field.theirs} is missing")
    # The older key has precedence, as in transformers, because users add it by hand.
    rope = values.get("rope_scaling") or values.get("rope_parameters") or {}
    problems += _unlike(values, kind, rope)
    if problems:
        raise ValueError(f"this {kind} configuration can't be a GPT: {'; '.join(problems)}")
    if rope.get("rope_type", rope.get("type")) == "llama3":
        stretch = {name: rope[key] for key, name in _STRETCH.items()}
        arguments["rope_scaling"] = RopeScaling(**stretch)
    if experts:
        share = values.get("router_aux_loss_coef", 0.001)
        arguments["balance_coefficient"] = share * arguments["experts_per_token"]
    if kind == "qwen3_moe":
        arguments["num_dense_layers"] = len(values.get("mlp_only_layers") or ())
    if kind == "dots1":
        width = (values.get("n_shared_experts") or 0) * arguments["expert_hidden_dim"]
        arguments |= {"expert_score": "sigmoid", "bias_rate": 0.001, "shared_hidden_dim": width}
    theta = rope.get("rope_theta", values.get("rope_theta", 1e4))
    return GPTConfig(rope_theta=float(theta), qk_norm=kind != "llama", **arguments)


def _unlike(values: Mapping[str, Any], kind: str, rope: Mapping[str, Any]) -> list[str]:
    """Options that change the computation and that GPT does not have, as error messages."""
    window = values.get("sliding_window", 4096 if values.get("model_type") == "mistral" else None)
    used = values.get("use_sliding_window", not kind.startswith("qwen3")) and window is not None
    dense = sorted(values.get("mlp_only_layers") or ())
    rotates, every = rope.get("rope_type", rope.get("type", "default")), "decoder_sparse_step"
    unlike = {
        f"hidden_act is {values.get('hidden_act')!r}, a GPT has silu": (
            values.get("hidden_act", "silu") not in ("silu", "swish")
        ),
        **{f"{key} is set, a GPT has no biases": values.get(key) for key in _BIASES},
        "quantization_config is set: use the weights before quantization": (
            values.get("quantization_config")
        ),
        f"sliding_window={window} is less than the context; a GPT attends to the whole context": (
            used and window < (values.get("max_position_embeddings") or 0)
        ),
        f"layer_types {values.get('layer_types')}: a GPT has full_attention everywhere": (
            set(values.get("layer_types") or ()) - {"full_attention"}
        ),
        "partial_rotary_factor is set, a GPT rotates whole heads": (
            values.get("partial_rotary_factor", 1.0) != 1.0
        ),
        f"mlp_only_layers={dense}, {every}={values.get(every, 1)}: in a GPT only the first layers "
        f"can be without experts": kind == "qwen3_moe"
        and (dense != list(range(len(dense))) or values.get(every, 1) != 1),
        f"rope type {rotates!r}: a GPT has 'default' and 'llama3'": (
            rotates not in ("default", "llama3")
        ),
        f"rope type 'llama3' needs {', '.join(_STRETCH)}": (
            rotates == "llama3" and not _STRETCH.keys() <= rope.keys()
        ),
    }
    return [text for text, is_unlike in unlike.items() if is_unlike]


_BIASES = ("attention_bias", "mlp_bias")
