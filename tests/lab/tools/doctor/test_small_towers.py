"""A small multimodal configuration: towers, what projects them, tokens of an image."""

import json

import transformers as hf

from midstream.lab.tools.doctor.cases import FIRST_TOKEN
from midstream.lab.tools.doctor.drawn_images import TOKEN
from midstream.lab.tools.doctor.model_copy import is_multimodal, small_whole, unknown_config
from midstream.lab.tools.doctor.small_config import VOCABULARY, Size
from midstream.lab.tools.doctor.small_towers import HEADS, LAYERS, WIDTH


def test_a_tower_is_small_and_gives_rows_as_wide_as_the_stream():
    config = hf.Qwen3VLConfig(architectures=["Qwen3VLForConditionalGeneration"])
    config.vision_config.deepstack_visual_indexes = [8, 16, 24]
    small = small_whole(config, Size(hidden=128))
    tower = small.vision_config
    assert (tower.depth, tower.num_heads, tower.hidden_size) == (LAYERS, HEADS, WIDTH)
    assert tower.out_hidden_size == small.text_config.hidden_size == 128
    assert tower.deepstack_visual_indexes == [1]
    assert tower.patch_size == config.vision_config.patch_size
    assert small.text_config.num_hidden_layers == 3
    assert small.architectures == config.architectures


def test_ids_of_an_image_are_that_of_drawn_images():
    small = small_whole(hf.Qwen3VLConfig(), Size())
    assert small.image_token_id == TOKEN < VOCABULARY
    assert small.video_token_id not in (TOKEN, *range(FIRST_TOKEN, VOCABULARY))
    omni = small_whole(hf.Qwen2_5OmniConfig(), Size()).thinker_config
    assert len({omni.image_token_id, omni.audio_token_id, omni.video_token_id}) == 3
    assert small_whole(hf.Qwen2AudioConfig(), Size()).audio_token_id == TOKEN
    llava = small_whole(hf.LlavaConfig(), Size())
    assert llava.image_token_index == TOKEN


def test_fields_beside_the_language_model_in_one_configuration_are_kept():
    fields = {
        "model_type": "a-flat-one", "architectures": ["MiniCPMV"], "hidden_size": 512,
        "num_hidden_layers": 30, "num_attention_heads": 8, "num_key_value_heads": 8,
        "vocab_size": 9000, "query_num": 64, "rope_parameters": {"rope_type": "default"},
        "vision_config": {"model_type": "siglip_vision_model", "num_hidden_layers": 27},
    }  # fmt: skip
    config = unknown_config(fields)
    assert type(config.vision_config) is hf.SiglipVisionConfig
    assert is_multimodal(config)
    small = small_whole(config, Size())
    assert (small.num_hidden_layers, small.hidden_size, small.query_num) == (3, 64, 64)
    assert small.rope_parameters == {"rope_type": "default"}
    assert small.vision_config.num_hidden_layers == LAYERS
    assert type(small.vision_config) is hf.SiglipVisionConfig


def test_parts_in_a_list_have_attributes_and_are_written_as_they_were_read():
    blocks = [{"attention": {"no_op": True}, "ffn": {"no_op": False, "ffn_mult": 1.5}}]
    fields = {"model_type": "of-blocks", "architectures": ["A"], "block_configs": blocks}
    config = unknown_config(fields)
    (block,) = config.block_configs
    assert (block.attention.no_op, block.ffn.ffn_mult) == (True, 1.5)
    assert not hasattr(block.attention, "ffn_mult")
    assert json.loads(config.to_json_string(use_diff=False))["block_configs"] == blocks


def test_a_language_model_is_not_multimodal():
    assert not is_multimodal(hf.LlamaConfig(architectures=["LlamaForCausalLM"]))
    assert is_multimodal(hf.Gemma3Config())
