"""config.json → ModelConfig, or a refusal that names what this engine does not run rightly.

What is refused is refused for a reason: angles that depend on the length of the prompt (dynamic,
longrope) give K that cannot be stored by prefix; sliding windows, latent attention, experts and
recurrent layers need other blocks or other arithmetic, and would give wrong answers in silence.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvstored_client.engine.config import CheckpointError, ModelConfig, RopeKind, RopeScaling
from kvstored_client.engine.rope import yarn_attention_factor

Raw = Mapping[str, object]

_CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size")
_RECURRENT = ("ssm_cfg", "mamba_d_state", "ssm_state_size", "state_size", "linear_num_value_heads")
_LENGTH_DEPENDENT = {"dynamic", "longrope", "su"}
_MOST = 1e38
"""Beyond it is no float32."""
_KINDS: tuple[RopeKind, ...] = ("default", "linear", "llama3", "yarn")


def model_config(raw: Raw, name: str) -> ModelConfig:
    """What config.json says of a model. Raises CheckpointError, which names `name` and the reason,
    for a model that this engine would not run rightly, and for fields that are missing.
    """
    reason = refusal(raw)
    if reason:
        raise CheckpointError(f"{name}: {reason}")
    try:
        return _config(raw, name)
    except _FieldError as error:
        raise CheckpointError(f"{name}: config.json: {error}") from error


def refusal(raw: Raw) -> str:
    """Why this engine does not run the model; "" where it does."""
    model_type = str(raw.get("model_type"))
    layers = raw.get("layer_types")
    kinds = {str(kind) for kind in layers} if isinstance(layers, list) else set()
    recurrent = kinds - {"full_attention", "sliding_attention", "chunked_attention"}
    reasons = {
        "quantised weights (quantization_config) are not read": raw.get("quantization_config"),
        "multi-head latent attention (MLA) is not supported": raw.get("kv_lora_rank"),
        "mixture of experts (MoE) is not supported": any(raw.get(key) for key in _EXPERTS),
        "recurrent or hybrid layers are not supported": recurrent
        or any(raw.get(key) for key in _RECURRENT),
        "sliding-window attention is not supported": _slides(raw, kinds),
        f"model_type {model_type!r} is not supported; {', '.join(_CLASSES)} are": model_type
        not in _CLASSES,
        "code of the model's own (auto_map) is not run": raw.get("auto_map"),
    }
    for reason, holds in reasons.items():
        if holds:
            return reason
    expected = _CLASSES[model_type]
    architectures = raw.get("architectures") or [expected]
    if architectures != [expected]:
        return f"architectures {architectures} are not supported; {expected} is"
    if raw.get("hidden_act", "silu") != "silu":
        return f"activation {raw['hidden_act']!r} is not supported; silu is"
    if raw.get("mlp_bias") or (model_type != "qwen2" and raw.get("attention_bias")):
        return "biases (attention_bias, mlp_bias) are not supported in this family"
    return ""


def _slides(raw: Raw, kinds: set[str]) -> bool:
    if kinds & {"sliding_attention", "chunked_attention"}:
        return True
    # Llama has no window whatever its config.json says; Qwen has one where it is switched on.
    known = str(raw.get("model_type")) in _CLASSES
    if kinds or raw.get("model_type") == "llama" or raw.get("sliding_window") is None:
        return False
    if not raw.get("use_sliding_window", not known):
        return False
    first = raw.get("max_window_layers", 28 if known else 0)
    layers = raw.get("num_hidden_layers", 0)
    return not (isinstance(first, int) and isinstance(layers, int) and first >= layers)


class _FieldError(ValueError):
    """A field that is missing, or of another type."""


def _config(raw: Raw, name: str) -> ModelConfig:
    model_type = raw["model_type"]
    hidden, heads = _integer(raw, "hidden_size"), _integer(raw, "num_attention_heads")
    head_dim = raw.get("head_dim") or (128 if model_type == "qwen3" else hidden // heads)
    context = _integer(raw, "max_position_embeddings")
    theta, scaling = _rope(raw, context)
    if scaling.kind == "yarn":
        context = max(context, int(scaling.original_context_tokens * scaling.factor))
    return ModelConfig(
        name=name,
        vocab_size=_integer(raw, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_integer(raw, "intermediate_size"),
        layers=_integer(raw, "num_hidden_layers"),
        heads=heads,
        kv_heads=_integer(raw, "num_key_value_heads", heads),
        head_dim=_integer({"head_dim": head_dim}, "head_dim"),
        rope_theta=theta,
        rms_epsilon=_above(0.0, raw, "rms_norm_eps", 1e-6),
        context_tokens=context,
        rope_scaling=scaling,
        qkv_bias=model_type == "qwen2",
        qk_norm=model_type == "qwen3",
    )


def _rope(raw: Raw, context_tokens: int) -> tuple[float, RopeScaling]:
    """The base and the scaling, from "rope_parameters" or from "rope_scaling" and "rope_theta"."""
    fields = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(fields, dict) or any(isinstance(value, dict) for value in fields.values()):
        raise _FieldError("RoPE that differs between layers is not supported")
    theta = _above(1.0, raw, "rope_theta", 10000.0)
    theta = _above(1.0, fields, "rope_theta", theta)
    partial = fields.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
    if partial not in (None, 1.0):
        raise _FieldError("RoPE over part of a head (partial_rotary_factor) is not supported")
    named = str(fields.get("rope_type", fields.get("type", "default")))
    if named in _LENGTH_DEPENDENT:
        raise _FieldError(
            f"RoPE {named!r} is refused: a token's K would depend on the length of the prompt, and "
            "could not be stored by its prefix"
        )
    kind = next((kind for kind in _KINDS if kind == named), None)
    if kind is None:
        raise _FieldError(f"RoPE {named!r} is not supported; {', '.join(_KINDS)} are")
    if kind == "default":
        return theta, RopeScaling()
    if kind == "linear":
        return theta, RopeScaling(kind, factor=_above(0.0, fields, "factor", 1.0))
    original = raw.get("original_max_position_embeddings") or fields.get(
        "original_max_position_embeddings"
    )
    original_tokens = _integer({"original": original or context_tokens}, "original")
    if kind == "llama3":
        return theta, RopeScaling(
            kind,
            factor=_above(0.0, fields, "factor"),
            original_context_tokens=original_tokens,
            low_frequency_factor=_above(0.0, fields, "low_freq_factor"),
            high_frequency_factor=_above(
                _real(fields, "low_freq_factor"), fields, "high_freq_factor"
            ),
        )
    return theta, _yarn(fields, original_tokens, context_tokens)


def _yarn(fields: Raw, original_tokens: int, context_tokens: int) -> RopeScaling:
    factor = _above(0.0, fields, "factor", context_tokens / original_tokens)
    scale, scale_all = _real(fields, "mscale", 0.0), _real(fields, "mscale_all_dim", 0.0)
    attention = yarn_attention_factor(factor)
    if scale and scale_all:
        attention = yarn_attention_factor(factor, scale) / yarn_attention_factor(factor, scale_all)
    return RopeScaling(
        "yarn",
        factor=factor,
        original_context_tokens=original_tokens,
        fast_turns=_real(fields, "beta_fast", 32.0) or 32.0,
        slow_turns=_real(fields, "beta_slow", 1.0) or 1.0,
        whole_dimensions=bool(fields.get("truncate", True)),
        attention_factor=_real(fields, "attention_factor", attention),
    )


def _integer(raw: Raw, name: str, default: int | None = None) -> int:
    value = raw.get(name)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _FieldError(f"{name} is {value!r}, not a number above 0")
    return value


def _real(raw: Raw, name: str, default: float | None = None) -> float:
    value = raw.get(name)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _FieldError(f"{name} is {value!r}, not a number")
    if not -_MOST < value < _MOST:  # nor NaN
        raise _FieldError(f"{name} is {value!s:.40}, not a finite number")
    return float(value)


def _above(least: float, raw: Raw, name: str, default: float | None = None) -> float:
    value = _real(raw, name, default)
    if value <= least:
        raise _FieldError(f"{name} is {value:g}, not above {least:g}")
    return value
