"""A tiny random Llama with a tokenizer, for vLLM's features of text, such as grammars and stops."""

from pathlib import Path

import torch
import transformers as hf

from support.tiny import HIDDEN, LAYERS
from support.tokenizers import byte_level


def make(folder: Path) -> Path:
    """Saves model and tokenizer; every byte is a token, and so are a few more."""
    target = folder / "talking"
    if (target / "tokenizer.json").exists():
        return target
    tokenizer = byte_level()
    tokenizer.eos_token = "<|im_end|>"
    torch.manual_seed(5)
    config = hf.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=512,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=0,
    )
    model = hf.AutoModelForCausalLM.from_config(config).float()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    return target
