"""Models' sizes: what is read of a configuration, and that weights are counted as they are."""

from __future__ import annotations

import json

import pytest
import torch

from midstream.errors import SpecError
from midstream.tools.capacity.shape import NAMED, read_config, read_model


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("smollm2-135m", 134_515_008),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("llama-8b", 8_030_261_248),
        ("llama-70b", 70_553_706_496),
        ("llama-405b", 405_853_388_800),
    ],
)
def test_named_models_have_the_weights_that_their_makers_publish(name, weights):
    found = read_model(name).weights
    assert found is not None
    assert found.total == pytest.approx(weights, rel=1e-3)


# Fields beside those that all have.
FAMILIES = {
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {"head_dim": 64},
    "gemma2": {"head_dim": 64},
    "gemma3_text": {"head_dim": 64},
    "phi3": {"pad_token_id": 0},
    "olmo2": {"tie_word_embeddings": True},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 192,
        "shared_expert_intermediate_size": 320,
        "decoder_sparse_step": 2,
    },
    "qwen3_moe": {
        "head_dim": 64,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 192,
        "mlp_only_layers": [1],
    },
    "deepseek_v3": {
        "q_lora_rank": 96,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 40,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 192,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
    },
}


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_as_many_as_transformers_makes(family):
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 8 if family == "deepseek_v3" else 2,
        "vocab_size": 1000,
        **FAMILIES[family],
    }
    config = AutoConfig.for_model(family, **fields)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    actual = sum(each.numel() for each in model.parameters())
    found = read_config(json.loads(config.to_json_string()), family, "", "auto").weights
    assert found is not None
    assert found.total == pytest.approx(actual, rel=2e-3)
    experts = {"mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3"}
    assert found.has_experts == (family in experts)
    assert (found.met < found.total - 2 * 512 * 1000) == (family in experts)


def test_a_model_whose_layers_are_not_known_has_a_size_but_no_weights():
    mamba = {"model_type": "mamba2", "hidden_size": 64, "num_hidden_layers": 2}
    found = read_config(mamba, "m", "", "auto")
    assert (found.hidden_size, found.num_layers, found.weights) == (64, 2, None)


def test_a_folder_and_its_file_say_the_same_and_other_families_words_are_read(tmp_path):
    config = {"n_embd": 768, "n_layer": 12, "model_type": "gpt2"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    folder, file = read_model(str(tmp_path)), read_model(str(tmp_path / "config.json"))
    assert (folder.hidden_size, folder.num_layers) == (768, 12)
    assert (file.hidden_size, file.num_layers, file.source) == (768, 12, folder.source)
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8-sig")
    assert read_model(str(tmp_path)).hidden_size == 768


def test_the_language_model_of_one_that_sees_is_what_counts():
    config = {"hidden_size": 5, "text_config": {"hidden_size": 64, "num_hidden_layers": 3}}
    found = read_config(config, "m", "", "auto")
    assert (found.hidden_size, found.num_layers) == (64, 3)


@pytest.mark.parametrize(
    ("fields", "asked", "dtype"),
    [
        ({}, "auto", "bfloat16"),
        ({"torch_dtype": "float32"}, "auto", "bfloat16"),
        ({"dtype": "float16"}, "auto", "float16"),
        ({"torch_dtype": "bfloat16"}, "float32", "float32"),
    ],
)
def test_the_dtype_is_the_engine_s(fields, asked, dtype):
    config = {"hidden_size": 64, "num_hidden_layers": 2, **fields}
    assert read_config(config, "m", "", asked).dtype == dtype


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[1]", "expected a JSON object"),
        ("{", "expected JSON"),
        ("{}", "model.hidden_size: the configuration has none of"),
        ('{"hidden_size": "8", "num_hidden_layers": 2}', "model.hidden_size: expected a number"),
        ('{"hidden_size": 8, "num_hidden_layers": 0}', "model.num_hidden_layers: expected"),
        ('{"hidden_size": 8, "num_hidden_layers": true}', "model.num_hidden_layers: expected"),
        ('{"hidden_size": 8, "num_hidden_layers": 2, "dtype": "int8"}', "dtype: the configuration"),
    ],
)
def test_a_configuration_that_does_not_say_what_must_be_known_is_refused(tmp_path, text, said):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(SpecError, match=said.replace(".", r"\.")):
        read_model(str(tmp_path))


def test_a_name_that_is_neither_known_nor_a_folder_is_refused_with_what_would_be_right():
    with pytest.raises(SpecError, match="model: expected one of .*llama-70b") as refused:
        read_model("llama-7b")
    assert all(name in str(refused.value) for name in NAMED)
    with pytest.raises(SpecError, match="dtype: expected auto"):
        read_model("llama-8b", "int4")
