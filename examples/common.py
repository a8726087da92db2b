"""Shared code of the examples: the model, an engine on the CPU or a GPU, and log probabilities."""

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
from midstream.lab.demo.model.smollm2 import NAME, make_smollm2

# vLLM reads environment variables and logs when it is imported. Variables that you set are kept.
with defaults(ALWAYS), quiet(verbose=False):
    import torch

    from midstream import LLM, Capture, SamplingParams

MODELS = Path(__file__).resolve().parent.parent / ".models"


def model_from(arguments: Sequence[str] | None, description: str | None) -> Path:
    """Return the model's folder from the command line. SmolLM2 is created if missing."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    default = Path(os.environ.get("MIDSTREAM_MODELS", MODELS)) / NAME
    parser.add_argument(
        "--model", type=Path, default=default, help="model folder in Hugging Face's format"
    )
    folder: Path = parser.parse_args(arguments).model
    return folder if (folder / "config.json").exists() else make_smollm2(folder)


def start(model: Path, sites: Sequence[str] = ("resid_post",)) -> LLM:
    """Start an engine with these sites tapped at every layer."""
    with defaults(ALWAYS), quiet(verbose=False):
        return LLM(
            str(model),
            midstream={"sites": list(sites)},
            dtype="bfloat16" if torch.cuda.is_available() else "float32",
            max_model_len=512,
            # Starts within seconds. Omit it for speed: compiled engines return the same.
            enforce_eager=True,
            disable_log_stats=True,
        )


def as_chats(questions: Sequence[str]) -> list[list[dict[str, str]]]:
    """Return one conversation per question."""
    return [[{"role": "user", "content": question}] for question in questions]


def ask(llm: LLM, questions: Sequence[str], max_tokens: int, **wanted: Any) -> list[Any]:
    """Return the outputs of one chat per question, at temperature 0.

    Args:
        **wanted: arguments of `midstream.LLM.chat`: `capture`, `steer`, `edits`, `probes`.
    """
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    return llm.chat(as_chats(questions), params, use_tqdm=False, **wanted)


def chat_prompts(llm: LLM, questions: Sequence[str]) -> list[str]:
    """Return each question in the model's chat template, up to the beginning of the answer."""
    template = llm.get_tokenizer().apply_chat_template
    return [template(c, tokenize=False, add_generation_prompt=True) for c in as_chats(questions)]


def last_rows(llm: LLM, questions: Sequence[str], layers: Any) -> dict[int, torch.Tensor]:
    """Return the vectors of the last prompt token: per layer, float32 [questions, width].

    Args:
        layers: layers, as for `Capture`.
    """
    outputs = ask(llm, questions, 1, capture=Capture(layers, positions="last_prompt"))
    return {
        layer: torch.cat([o.activations["resid_post", layer].float() for o in outputs])
        for layer in outputs[0].activations.layers
    }


def log_probs(
    llm: LLM, prompts: Sequence[str], endings: Sequence[str], **wanted: Any
) -> dict[str, torch.Tensor]:
    """Return the log probability of each ending after each prompt: per ending, [prompts], in nats.

    Nothing is sampled: prompt and ending are processed in one forward pass, and vLLM returns the
    log probabilities of these tokens.

    Args:
        **wanted: arguments of `midstream.LLM.generate`, and arguments of `SamplingParams` as
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
    """Print a table; numbers with two decimals."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for column, first in zip(columns, rows[0], strict=True):
        table.add_column(column, justify="left" if isinstance(first, str) else "right")
    for row in rows:
        # One line per row: texts of the model may have several lines.
        cells = (f"{v:.2f}" if isinstance(v, float) else " ".join(str(v).split()) for v in row)
        table.add_row(*cells)
    console = Console()
    if not console.is_terminal:
        console = Console(width=100)
    console.print(table, markup=False)
