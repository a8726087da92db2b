"""What the documents show runs: each page's snippets in order, on a tiny model with 30 layers; and
at night the first snippet of each page alone in an empty folder, with SmolLM2.
"""

import gc
import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from support import engines
from support.pages import blocks
from support.tokenizers import byte_level

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    "docs/ask.md",
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
    "docs/train-sae.md",
]
# Pages whose snippets take longest run at night. That they compile and that the names and arguments
# in them exist is in `repo/test_docs.py`; what they do is in the tests of each part.
LONG = (
    "ask",
    "attention",
    "attribution",
    "fitting",
    "operations",
    "patching",
    "pictures",
    "selecting",
    "train-sae",
)
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
README_MODEL = ".models/SmolLM2-135M-Instruct"
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
    """Where the snippets run, with a model of the name that they have it download."""
    folder = tmp_path_factory.mktemp("docs")
    tokenizer = byte_level()
    # One token each, as in SmolLM2, and as in models that think.
    tokenizer.add_tokens([" ?", " Paris", " London", " Berlin", "<think>", "</think>"])
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
    return folder


@pytest.fixture(scope="module")
def quick_engines() -> Iterator[None]:
    """Every engine that is made in this process starts with `QUICK`."""
    import vllm

    # What is imported by now is not searched for garbage at the start of each engine.
    for name in ("midstream.lab.api.llm", "vllm.v1.worker.gpu_model_runner"):
        importlib.import_module(name)
    original = vllm.LLM.__init__
    threads = torch.get_num_threads()
    with engines.closing() as made, pytest.MonkeyPatch.context() as patch:

        def start(self: Any, model: str, **args: Any) -> None:
            original(self, model, **{**QUICK, **args})
            made[:] = [self]
            # So small a model runs slower on several threads, much slower on a busy machine. Not by
            # torch.set_num_threads, which vLLM has replaced by nothing.
            torch._C.set_num_threads(1)

        patch.setattr(vllm.LLM, "__init__", start)
        yield
    torch._C.set_num_threads(threads)
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
    # The program with an AsyncLLM starts an engine process of its own: it is only defined.
    namespace = {"__name__": "docs" if page == "docs/dynamic.md" else "__main__"}
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
    assert code.count(f'"{README_MODEL}"') == 1
    code = code.replace(f'"{README_MODEL}"', repr(str(smollm2)))
    engines.prepare_vllm()
    capsys.readouterr()
    exec(compile("\n" * line + code, str(ROOT / "README.md"), "exec"), {"__name__": "__main__"})
    gc.collect()
    printed = capsys.readouterr().out
    assert shown in printed, printed


@pytest.fixture(scope="session")
def hub(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of the Hugging Face Hub that has the pages' model, without a network."""
    found = tmp_path_factory.mktemp("hub")
    model = found / "hub" / f"models--{MODEL.replace('/', '--')}"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text("0" * 40)
    (model / "snapshots").mkdir()
    (model / "snapshots" / ("0" * 40)).symlink_to(smollm2)
    return found


@pytest.mark.model
@pytest.mark.nightly
@pytest.mark.parametrize("page", PAGES)
def test_the_first_snippet_of_a_page_runs_alone_in_an_empty_folder(
    page: str, hub: Path, tmp_path: Path
) -> None:
    (line, text), *_ = snippets(page)
    file = tmp_path / "snippet.py"
    file.write_text(text)
    environment = {
        **os.environ,
        "HF_HOME": str(hub),
        "HF_HUB_OFFLINE": "1",
        # On a CPU vLLM takes a share of the machine's memory otherwise.
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "PYTHONPATH": str(ROOT / "src"),
    }
    done = subprocess.run(
        [sys.executable, file], cwd=tmp_path, env=environment,
        capture_output=True, text=True, timeout=550, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{page}:{line}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
    assert done.stdout.strip(), "a first snippet shows something"
