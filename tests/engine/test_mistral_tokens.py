"""Texts and roles where mistral_common makes the tokens of a chat, on a tiny random Mistral."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mistral_common
import pytest
import torch
import transformers as hf
from support.engines import engine, greedy

from midstream import Probe, Role, Text

TEKKEN = Path(mistral_common.__file__).parent / "data" / "tekken_240911.json"
VECTOR = torch.ones(64)
CHAT = [
    {"role": "system", "content": "Be terse."},
    {"role": "user", "content": "What is a caf\u00e9 \U0001f600 there?"},
    {"role": "assistant", "content": "An owl."},
    {"role": "user", "content": "And there?"},
]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    path = tmp_path_factory.mktemp("tekken")
    config = hf.MistralConfig(
        vocab_size=131072,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=512,
        sliding_window=None,
    )
    config.architectures = ["MistralForCausalLM"]
    torch.manual_seed(7)
    hf.MistralForCausalLM(config).save_pretrained(path)
    shutil.copy(TEKKEN, path / "tekken.json")
    more = {"tokenizer_mode": "mistral", "config_format": "hf", "load_format": "safetensors"}
    with engine(path, skip_tokenizer_init=False, **more) as found:
        yield found


def spelt(llm: Any, **selections: Any) -> dict[str, str]:
    """What the tokens of each selection spell in the chat."""
    probes = [
        Probe(VECTOR, layer=1, name=name, positions=where) for name, where in selections.items()
    ]
    output = llm.chat(CHAT, greedy(1), probes=[probes], use_tqdm=False)[0]
    decode = llm.get_tokenizer().decode
    return {
        name: decode([output.prompt_token_ids[place] for place in output.probes.positions_of(name)])
        for name in selections
    }


def test_messages_are_where_the_decoded_tokens_have_them(llm: Any) -> None:
    found = spelt(
        llm,
        first=Role("user", 0),
        last=Role("user"),
        answer=Role("assistant"),
        text=Text("caf\u00e9"),
    )
    assert {name: text.strip() for name, text in found.items()} == {
        "first": CHAT[1]["content"],
        "last": CHAT[3]["content"],
        "answer": CHAT[2]["content"],
        "text": "caf\u00e9",
    }
