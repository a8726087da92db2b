"""Entry points: vLLM learns of the model, midstream of its decoder layer."""

from __future__ import annotations


def register_model() -> None:
    """Register the model with vLLM; its module is imported when it is loaded."""
    from vllm import ModelRegistry

    ModelRegistry.register_model(
        "HalvedForCausalLM", "midstream_layer_example_model:HalvedForCausalLM"
    )


def register_layers() -> None:
    """Say where the sites are in the model's decoder layer."""
    from midstream.layers import pair, register_layer

    register_layer(
        "midstream_layer_example_model.HalvedDecoderLayer", pair("post_attention_layernorm")
    )
