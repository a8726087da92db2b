"""A small configuration keeps one of each kind of layer, and its fields fit each other."""

import copy

import pytest

from midstream.lab.tools.doctor import layers_kept
from midstream.lab.tools.doctor.small_config import EXPERTS, HEAD_DIM, VOCABULARY, Size, shrink

LLAMA = {
    "model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "max_position_embeddings": 4096, "bos_token_id": 1, "eos_token_id": 31999,
    "tie_word_embeddings": False, "rms_norm_eps": 1e-6,
}  # fmt: skip
FULL, WINDOW, LINEAR = "full_attention", "sliding_attention", "linear_attention"


def test_widths_heads_and_vocabulary_are_small_and_the_rest_stays():
    found = shrink(LLAMA, Size())
    assert found["hidden_size"] == 64
    assert found["num_hidden_layers"] == 3
    assert found["num_attention_heads"] * found["head_dim"] == 64
    assert found["num_key_value_heads"] == 1, "grouped heads stay grouped"
    assert found["vocab_size"] == VOCABULARY
    assert found["tie_word_embeddings"] is False
    assert found["rms_norm_eps"] == 1e-6
    found = shrink(LLAMA, Size(hidden=256))
    assert found["num_attention_heads"] * found["head_dim"] == 256
    assert found["head_dim"] == HEAD_DIM
    found = shrink({**LLAMA, "num_key_value_heads": 32}, Size())
    assert found["num_key_value_heads"] == found["num_attention_heads"]
    found = shrink({**LLAMA, "eos_token_id": [31998, 31999], "pad_token_id": 31999}, Size())
    assert all(token < VOCABULARY for token in [*found["eos_token_id"], found["pad_token_id"]])
    found = shrink(
        {**LLAMA, "quantization_config": {"bits": 4}, "auto_map": {"AutoModel": "x.Y"}}, Size()
    )
    assert not {"quantization_config", "auto_map"} & set(found)


def test_sections_of_multimodal_rope_are_those_of_the_small_head():
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20]}
    found = shrink({**LLAMA, "rope_parameters": rope}, Size())["rope_parameters"]
    assert found == {**rope, "mrope_section": [6, 5, 5]}
    assert sum(found["mrope_section"]) == HEAD_DIM // 2
    half = {**rope, "partial_rotary_factor": 0.5, "mrope_section": [8, 12, 12]}
    found = shrink({**LLAMA, "rope_parameters": half}, Size())["rope_parameters"]
    assert found["mrope_section"] == [2, 3, 3]


def test_the_given_configuration_is_left_as_it_was_and_one_without_layers_refused():
    given = {**LLAMA, "layer_types": [FULL] * 32}
    before = copy.deepcopy(given)
    shrink(given, Size())
    assert given == before
    with pytest.raises(ValueError, match="no number of layers.*num_hidden_layers"):
        shrink({"hidden_size": 64}, Size())


def test_experts_are_few_and_heads_of_latent_attention_and_mamba_fit_their_widths():
    found = shrink(
        {**LLAMA, "n_routed_experts": 256, "num_experts_per_tok": 8, "n_group": 8}, Size()
    )
    assert found["n_routed_experts"] == EXPERTS > found["num_experts_per_tok"]
    assert found["n_group"] == 1
    found = shrink(
        {**LLAMA, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
         "v_head_dim": 128, "head_dim": 64}, Size()
    )  # fmt: skip
    assert found["kv_lora_rank"] + found["qk_rope_head_dim"] == 576
    assert found["head_dim"] == 64
    given = {**LLAMA, "mamba_expand": 2, "mamba_n_heads": 128, "mamba_d_head": 64}
    found = shrink(given, Size())
    assert found["mamba_n_heads"] * found["mamba_d_head"] == 2 * found["hidden_size"]


@pytest.mark.parametrize(
    ("lists", "kept"),
    [
        ({}, [0, 1, 2]),
        ({"layer_types": [WINDOW] * 5 + [FULL] + [WINDOW] * 26}, [0, 1, 5]),
        ({"layer_types": [LINEAR] * 31 + [FULL]}, [0, 1, 31]),
        ({"layers_block_type": ["mamba", "moe", "attention", "mlp"] * 8}, [0, 1, 2, 3]),
        ({"layer_types": [WINDOW, FULL] * 16, "mlp_layer_types": ["dense"] + ["sparse"] * 31},
         [0, 1, 2]),
        ({"full_attn_idxs": [7, 20]}, [0, 1, 7]),
        ({"hybrid_override_pattern": "M" * 30 + "*-"}, [0, 30, 31]),
    ],
)  # fmt: skip
def test_one_layer_of_each_kind_is_kept(lists, kept):
    config = {**LLAMA, **lists}
    assert layers_kept.choose(config, 3) == kept


def test_lists_by_layer_and_lists_of_layers_follow_the_layers_that_are_kept():
    config = {
        **LLAMA,
        "layer_types": [LINEAR] * 31 + [FULL],
        "full_attn_idxs": [31],
        "hybrid_override_pattern": "M" * 31 + "*",
        "per_layer_config": {"31": {"head_dim": 256}},
    }
    layers_kept.keep(config, [0, 1, 31])
    assert config["num_hidden_layers"] == 3
    assert config["layer_types"] == [LINEAR, LINEAR, FULL]
    assert config["full_attn_idxs"] == [2]
    assert config["hybrid_override_pattern"] == "MM*"
    assert config["per_layer_config"] == {"2": {"head_dim": 256}}
