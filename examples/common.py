"""What the examples share: the model, an engine on the CPU or a GPU, and how likely a text is."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from midstream.console import ALWAYS, defaults, quiet
from midstream.demo.model.smollm2 import NAME, make_smollm2

# vLLM reads its settings, and says much, when it is imported. What you have set yourself is kept.
with defaults(ALWAYS), quiet(verbose=False):
    import torch

    from midstream import LLM, Capture, SamplingParams

MODELS = Path(__file__).resolve().parent.parent / ".models"


def model_from(arguments: Sequence[str] | None, description: str | None) -> Path:
    """The model's folder from the command line. SmolLM2 is made there when it is absent."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    default = Path(os.environ.get("MIDSTREAM_MODELS", MODELS)) / NAME
    parser.add_argument("--model", type=Path, default=default, help="a folder as of Hugging Face")
    folder: Path = parser.parse_args(arguments).model
    return folder if (folder / "config.json").exists() else make_smollm2(folder)


def start(model: Path, sites: Sequence[str] = ("resid_post",)) -> LLM:
    """An engine with these sites tapped at every layer."""
    with defaults(ALWAYS), quiet(verbose=False):
        return LLM(
            str(model),
            midstream={"sites": list(sites)},
            dtype="bfloat16" if torch.cuda.is_available() else "float32",
            max_model_len=512,
            # Starts within seconds. Leave it out where speed matters: compiled engines do the same.
            enforce_eager=True,
            disable_log_stats=True,
        )


def as_chats(questions: Sequence[str]) -> list[list[dict[str, str]]]:
    """One conversation per question."""
    return [[{"role": "user", "content": question}] for question in questions]


def ask(llm: LLM, questions: Sequence[str], max_tokens: int, **wanted: Any) -> list[Any]:
    """The outputs of one chat per question, at temperature 0.

    Args:
        **wanted: what `midstream.LLM.chat` takes: `capture`, `steer`, `edits`, `probes`.
    """
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    return llm.chat(as_chats(questions), params, use_tqdm=False, **wanted)


def chat_prompts(llm: LLM, questions: Sequence[str]) -> list[str]:
    """Each question in the model's chat template, up to where the answer begins."""
    template = llm.get_tokenizer().apply_chat_template
    return [template(c, tokenize=False, add_generation_prompt=True) for c in as_chats(questions)]


def last_rows(llm: LLM, questions: Sequence[str], layers: Any) -> dict[int, torch.Tensor]:
    """The vectors at which the answer begins: per layer, float32 [questions, width].

    Args:
        layers: what `Capture` takes.
    """
    outputs = ask(llm, questions, 1, capture=Capture(layers, positions="last_prompt"))
    return {
        layer: torch.cat([o.activations["resid_post", layer].float() for o in outputs])
        for layer in outputs[0].activations.layers
    }


def log_probs(
    llm: LLM, prompts: Sequence[str], endings: Sequence[str], **wanted: Any
) -> dict[str, torch.Tensor]:
    """How likely the model finds each ending after each prompt: per ending, [prompts], in nats.

    Nothing is sampled: prompt and ending are read in one forward, and vLLM gives the log
    probabilities of what it reads.

    Args:
        **wanted: what `midstream.LLM.generate` takes, and arguments of `SamplingParams` as
            `sampling={…}`.
    """
    encode = llm.get_tokenizer().encode
    tails = {ending: encode(ending, add_special_tokens=False) for ending in endings}
    texts = [(encode(prompt), ending) for ending in endings for prompt in prompts]
    params = SamplingParams(
        temperature=0, max_tokens=1, prompt_logprobs=0, **wanted.pop("sampling", {})
    )
    outputs = llm.generate(
        [{"prompt_token_ids": head + tails[ending]} for head, ending in texts],
        params,
        use_tqdm=False,
        **wanted,
    )
    found: dict[str, list[float]] = {ending: [] for ending in endings}
    for (head, ending), output in zip(texts, outputs, strict=True):
        steps = zip(output.prompt_logprobs[len(head) :], tails[ending], strict=True)
        found[ending].append(sum(step[token].logprob for step, token in steps))
    return {ending: torch.tensor(values) for ending, values in found.items()}


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Prints a table; numbers with two decimals."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for column, first in zip(columns, rows[0], strict=True):
        table.add_column(column, justify="left" if isinstance(first, str) else "right")
    for row in rows:
        # A line for each: what the model writes may have several.
        cells = (f"{v:.2f}" if isinstance(v, float) else " ".join(str(v).split()) for v in row)
        table.add_row(*cells)
    console = Console()
    if not console.is_terminal:
        console = Console(width=100)
    console.print(table, markup=False)
