"""What the documents show runs: each page's snippets in order, on a tiny model with 30 layers."""

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import save_file
from support import engines
from support.pages import blocks
from support.tokenizers import byte_level

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    "docs/attention.md",
    "docs/attribution.md",
    "docs/coming-from.md",
    "docs/dataset-capture.md",
    "docs/dynamic.md",
    "docs/fitting.md",
    "docs/guide.md",
    "docs/lens.md",
    "docs/operations.md",
    "docs/patching.md",
    "docs/pictures.md",
    "docs/probing.md",
    "docs/quickstart.md",
    "docs/selecting.md",
    "docs/sinks.md",
    "docs/steering.md",
]
# Pages whose snippets take longest run at night. That they compile and that the names and arguments
# in them exist is in `repo/test_docs.py`.
LONG = ("attention", "attribution", "fitting", "operations", "patching", "selecting")
# Their snippets stand under `if __name__ == "__main__":`.
AS_A_FILE = ("docs/probing.md", "docs/quickstart.md")
MODEL = ".models/SmolLM2-135M-Instruct"
HIDDEN = 64
# What the snippets do not say, and what makes a start take seconds.
QUICK = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 256,
    "max_num_batched_tokens": 512,
    "max_num_seqs": 8,
    "num_gpu_blocks_override": 64,
    "disable_log_stats": True,
    "seed": 0,
}


def snippets(page: str) -> list[tuple[int, str]]:
    """(line, text) of each block of Python that needs an engine in its process: not of values, for
    which there is a test without an engine, nor of clients, which need a server, nor of images,
    which `test_images` runs.
    """
    found = [(line, text) for line, _, text in blocks(page, ["python"])]
    others = ("# needs no engine", "# needs a server", "# needs a vision-language model")
    return [each for each in found if not each[1].startswith(others)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the snippets run: the files that they name are here."""
    folder = tmp_path_factory.mktemp("docs")
    tokenizer = byte_level()
    # One token each, as in SmolLM2, and as in models that think.
    tokenizer.add_tokens([" Paris", " London", " Berlin", "<think>", "</think>"])
    config = hf.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_hidden_layers=30,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    hf.AutoModelForCausalLM.from_config(config).float().save_pretrained(folder / MODEL)
    tokenizer.save_pretrained(folder / MODEL)
    (folder / "vectors").mkdir()
    save_file({"15": torch.randn(HIDDEN)}, folder / "vectors" / "happy.safetensors")
    sae = folder / "saes" / "layer-12"
    sae.mkdir(parents=True)
    sizes = {"W_enc": (HIDDEN, 9), "b_enc": (9,), "W_dec": (9, HIDDEN), "b_dec": (HIDDEN,)}
    weights = {name: torch.randn(size) for name, size in sizes.items()}
    save_file(weights, sae / "sae_weights.safetensors")
    said = {"architecture": "standard", "hook_name": "blocks.12.hook_resid_post"}
    (sae / "cfg.json").write_text(json.dumps({**said, "apply_b_dec_to_input": False}))
    return folder


@pytest.fixture(scope="module")
def quick_engines() -> Iterator[None]:
    """Every engine that is made in this process starts with `QUICK`."""
    import vllm

    engines.prepare_vllm()
    original = vllm.LLM.__init__
    cores: list[Any] = []
    threads = torch.get_num_threads()

    def start(self: Any, model: str, **args: Any) -> None:
        original(self, model, **{**QUICK, **args})
        cores[:] = [self.llm_engine.engine_core]
        # So small a model runs slower on several threads, much slower on a busy machine. Not by
        # torch.set_num_threads, which vLLM has replaced by nothing.
        torch._C.set_num_threads(1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm.LLM, "__init__", start)
        yield
    torch._C.set_num_threads(threads)
    if cores:
        cores[0].shutdown()
    gc.collect()
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.nightly) if Path(page).stem in LONG else page
        for page in PAGES
    ],
)
def test_the_snippets_of_a_page_run_one_after_the_other(page, folder, quick_engines, monkeypatch):
    monkeypatch.chdir(folder)
    # The guide's program for AsyncLLM starts an engine process of its own: it is only defined.
    namespace = {"__name__": "__main__" if page in AS_A_FILE else "docs"}
    blocks = snippets(page)
    assert blocks
    for line, text in blocks:
        exec(compile("\n" * line + text, str(ROOT / page), "exec"), namespace)
    namespace.clear()
    gc.collect()


@pytest.mark.model
@pytest.mark.nightly
def test_the_readme_s_snippet_prints_what_the_readme_shows(smollm2, quick_engines, capsys):
    [(line, code)] = snippets("README.md")
    [shown] = [text for _, _, text in blocks("README.md", ["text"])]
    # vLLM keeps tokenizers by the model's name, and other pages give a tiny model this one.
    assert code.count(f'"{MODEL}"') == 1
    code = code.replace(f'"{MODEL}"', repr(str(smollm2)))
    engines.prepare_vllm()
    capsys.readouterr()
    exec(compile("\n" * line + code, str(ROOT / "README.md"), "exec"), {"__name__": "__main__"})
    gc.collect()
    printed = capsys.readouterr().out
    assert shown in printed, printed
