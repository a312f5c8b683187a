"""Hugging Face directories: one file or shards, dtypes, and what is refused, by name."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from engine_hf import change_json, save_random
from safetensors.torch import load_file, save_file

from kvstored_client.engine.checkpoint import CheckpointError, TokenizerFiles, load
from kvstored_client.engine.config import RopeScaling
from kvstored_client.engine.fingerprint import weights_fingerprint


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "tiny-qwen"
    save_random(folder, "qwen3", dtype=torch.bfloat16)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy that the test may damage."""
    copy = tmp_path / saved.name
    copy.mkdir()
    for file in saved.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


def test_a_directory_is_loaded_as_it_is_or_converted(saved: Path) -> None:
    loaded = load(saved)
    stored = load_file(saved / "model.safetensors")
    assert loaded.config.name == "tiny-qwen"
    assert loaded.config.qk_norm
    assert (loaded.config.head_dim, loaded.config.context_tokens) == (24, 512)
    assert loaded.tensors.keys() == stored.keys()
    for name, tensor in loaded.tensors.items():
        assert torch.equal(tensor, stored[name])
        assert tensor.is_contiguous()
    exact = load(saved, dtype="float32").tensors
    assert all(torch.equal(exact[name], tensor.float()) for name, tensor in stored.items())


def test_shards_are_put_together(tmp_path: Path) -> None:
    save_random(tmp_path, "qwen2", shard_bytes=20_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    shards = sorted(set(index["weight_map"].values()))
    assert len(shards) > 2
    loaded = load(tmp_path)
    for shard in shards:
        for name, tensor in load_file(tmp_path / shard).items():
            assert torch.equal(loaded.tensors[name], tensor)
    before = weights_fingerprint(tmp_path, 0, tmp_path / "cache")
    last = load_file(tmp_path / shards[-1])
    next(iter(last.values())).view(-1)[-1] += 1
    save_file(last, tmp_path / shards[-1])
    assert weights_fingerprint(tmp_path, 0, tmp_path / "cache") != before
    (tmp_path / shards[1]).unlink()
    with pytest.raises(CheckpointError, match=f"names '{shards[1]}', which is not there"):
        load(tmp_path)
    save_file(last, tmp_path.parent / "model.safetensors")
    index["weight_map"]["model.norm.weight"] = "../model.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"names '\.\./model.safetensors'"):
        load(tmp_path)


def test_tied_embeddings_go_before_a_head_that_lies_about(folder: Path) -> None:
    assert not torch.equal(
        load(folder).tensors["lm_head.weight"], load(folder).tensors["model.embed_tokens.weight"]
    )
    change_json(folder / "config.json", tie_word_embeddings=True)
    assert "lm_head.weight" not in load(folder).tensors
    stored = load_file(folder / "model.safetensors")
    del stored["lm_head.weight"]
    save_file(stored, folder / "model.safetensors")
    assert "lm_head.weight" not in load(folder).tensors
    change_json(folder / "config.json", tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=r"1 tensors are missing, lm_head.weight first"):
        load(folder)


def test_ends_of_answers_and_templates_are_found(folder: Path) -> None:
    change_json(folder / "generation_config.json", eos_token_id=[7, 9])
    change_json(
        folder / "tokenizer_config.json",
        eos_token={"content": "<end>", "special": True},
        bos_token="<begin>",
        chat_template=[
            {"name": "tool_use", "template": "tools"},
            {"name": "default", "template": "plain"},
        ],
    )
    found = load(folder).tokenizer
    assert isinstance(found, TokenizerFiles)
    assert found.eos_ids == (7, 9)
    assert found.special_tokens == {"eos_token": "<end>", "bos_token": "<begin>"}
    assert found.chat_template == "plain"
    (folder / "generation_config.json").unlink()
    (folder / "chat_template.jinja").write_text("of its own")
    found = load(folder).tokenizer
    assert isinstance(found, TokenizerFiles)
    assert found.eos_ids == (2,)
    assert found.chat_template == "of its own"


REFUSED = [
    ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "RoPE 'dynamic' is refused"),
    ({"rope_parameters": {"rope_type": "longrope"}}, "RoPE 'longrope' is refused"),
    (
        {"rope_parameters": None, "rope_scaling": {"type": "su"}, "rope_theta": 1e4},
        "RoPE 'su' is refused",
    ),
    ({"rope_parameters": {"rope_type": "mrope"}}, "RoPE 'mrope' is not supported"),
    ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is None"),
    ({"rope_parameters": {"rope_type": ["yarn"]}}, "RoPE .*yarn.* is not supported"),
    ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, "factor is 0, not above 0"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": -2.0}}, "factor is -2, not above 0"),
    ({"rope_parameters": {"rope_theta": 1.0}}, "rope_theta is 1, not above 1"),
    ({"rope_parameters": {"rope_theta": math.nan}}, "rope_theta is nan, not a finite"),
    ({"rope_parameters": {"rope_theta": 10**400}}, "rope_theta is 1000.*, not a finite"),
    ({"rms_norm_eps": -1.0}, "rms_norm_eps is -1, not above 0"),
    ({"model_type": ["llama"]}, "model_type .*llama.* is not supported"),
    ({"rope_parameters": {"full_attention": {}}}, "RoPE that differs between layers"),
    ({"partial_rotary_factor": 0.5}, "RoPE over part of a head"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window attention"),
    (
        {
            "use_sliding_window": True,
            "sliding_window": 64,
            "layer_types": None,
            "max_window_layers": 1,
        },
        "sliding-window attention",
    ),
    (
        {
            "model_type": "mistral",
            "use_sliding_window": None,
            "max_window_layers": None,
            "sliding_window": 64,
            "layer_types": None,
        },
        "sliding-window attention",
    ),
    ({"model_type": "deepseek_v3", "kv_lora_rank": 512}, r"multi-head latent attention \(MLA\)"),
    ({"model_type": "qwen3_moe", "num_experts": 8}, r"mixture of experts \(MoE\)"),
    ({"model_type": "mixtral", "num_local_experts": 8}, r"mixture of experts \(MoE\)"),
    ({"layer_types": ["linear_attention", "full_attention"]}, "recurrent or hybrid layers"),
    ({"model_type": "mamba", "state_size": 16}, "recurrent or hybrid layers"),
    ({"quantization_config": {"quant_method": "awq"}}, "quantised weights"),
    ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported; llama, qwen2, qwen3 are"),
    ({"auto_map": {"AutoModel": "x.Y"}}, "code of the model's own"),
    ({"architectures": ["Qwen3ForSequenceClassification"]}, "Qwen3ForCausalLM is"),
    ({"hidden_act": "gelu"}, "activation 'gelu'"),
    ({"attention_bias": True}, r"biases \(attention_bias"),
    ({"hidden_size": None}, "hidden_size is None, not a number above 0"),
    ({"num_key_value_heads": 3}, "4 heads cannot share 3 KV heads"),
    ({"dtype": "float8_e4m3fn"}, "weights of dtype 'float8_e4m3fn'"),
    ({"intermediate_size": 96}, r"down_proj.weight is \[64, 112\], not \[64, 96\]"),
    ({"num_hidden_layers": 3, "layer_types": None}, "11 tensors are missing, model.layers.2"),
    ({"num_hidden_layers": 1, "layer_types": None}, "has no place in the model"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_what_it_cannot_run_rightly_is_refused_by_name(
    folder: Path, changes: dict[str, object], message: str
) -> None:
    change_json(folder / "config.json", **changes)
    with pytest.raises(CheckpointError, match=message):
        load(folder)


def test_what_is_switched_off_is_not_refused(folder: Path) -> None:
    change_json(
        folder / "config.json", use_sliding_window=False, sliding_window=64, layer_types=None
    )
    assert load(folder).config.layers == 2
    change_json(folder / "config.json", use_sliding_window=True, max_window_layers=2)
    assert load(folder).config.layers == 2


def test_older_configs_are_read(folder: Path) -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    change_json(
        folder / "config.json", rope_parameters=None, rope_scaling=scaling, rope_theta=123.0
    )
    config = load(folder).config
    assert config.rope_theta == 123.0
    assert config.context_tokens == 2048
    assert config.rope_scaling == RopeScaling(
        "yarn", factor=4.0, original_context_tokens=512, attention_factor=1.1386294361119891
    )


def test_damaged_and_missing_files_are_named(folder: Path) -> None:
    weights = folder / "model.safetensors"
    stored = load_file(weights)
    save_file(stored | {"model.extra": torch.ones(1)}, weights)
    with pytest.raises(CheckpointError, match=r"tensor 'model.extra' has no place"):
        load(folder)
    save_file({k: v.to(torch.int8) if "norm" in k else v for k, v in stored.items()}, weights)
    with pytest.raises(CheckpointError, match=r"torch.int8: quantised weights are not read"):
        load(folder)
    weights.write_bytes(b"\x10" + bytes(30))
    with pytest.raises(CheckpointError, match=r"model.safetensors: it cannot be read"):
        load(folder)
    weights.rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin is pickled, convert it"):
        load(folder)
    for damaged in ("{", "[" * 100_000):
        (folder / "config.json").write_text(damaged)
        with pytest.raises(CheckpointError, match=r"config.json: it cannot be read as JSON"):
            load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config.json is missing"):
        load(folder)


def test_the_fingerprint_of_a_directory_changes_with_every_weight(folder: Path) -> None:
    cache = folder / "cache"
    before = weights_fingerprint(folder, 0, cache)
    assert len(before) == 64
    assert weights_fingerprint(folder, 0, cache) == before
    (folder / "README.md").write_text("says nothing of weights")
    assert weights_fingerprint(folder, 0, cache) == before
    stored = load_file(folder / "model.safetensors")
    changed = {before}
    for name in ("model.embed_tokens.weight", "model.layers.1.self_attn.k_norm.weight"):
        copy = {k: v.clone() for k, v in stored.items()}
        copy[name].view(-1)[3] += 1
        save_file(copy, folder / "model.safetensors")
        changed.add(weights_fingerprint(folder, 0, cache))
    assert len(changed) == 3
    change_json(folder / "config.json", rms_norm_eps=1e-3)
    changed.add(weights_fingerprint(folder, 0, cache))
    assert len(changed) == 4
