"""Train an EAGLE-3 head with speculators, and count how many of its tokens vLLM accepts.

The model answers questions about a few topics, and a store keeps the rows of its answers.
Speculators' own trainer reads them from an export. vLLM then drafts with the head (Li et al. 2025,
"EAGLE-3", arXiv:2503.01840) in answers to questions about other topics.

    pip install speculators==0.9.0
    python examples/train_draft.py [--model FOLDER]

With a few thousand tokens this is a toy: a head for use needs a hundred million.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import as_chats, model_from, show

from midstream import LLM, Capture, SamplingParams, open_store
from midstream.console import ALWAYS, defaults, quiet
from midstream.lab.export import export
from midstream.lab.jobs import Job, capture_dataset

LAYERS = [1, 14, 26]  # what the head reads of the 30 layers: those of speculators' defaults
LAST = 29
TOPICS = ["rain", "bread", "the moon", "bees", "trains", "coffee", "trees", "snow", "cats", "tea"]
HELD_OUT = ["rivers", "horses", "clocks", "cheese"]
FORMS = ["Give me five facts about {}.", "Explain {} to a child.", "Why do people like {}?"]
TOKENS = 32  # of an answer
ENGINE: dict[str, Any] = {"enforce_eager": True, "max_model_len": 512}
# A small vocabulary and short sequences.
SMALL = ("--draft-vocab-size=1024", "--total-seq-len=256", "--num-workers=0")
# No kernels that need an accelerator, and no bfloat16, which an old CPU emulates slowly.
ON_CPU = (
    "--draft-attn-impl=eager",
    "--loss-implementation=eager",
    "--optimizer=adamw",  # the default multiplies matrices in bfloat16
    "--hidden-states-dtype=float32",
)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the example; return the losses and the acceptance length."""
    model = model_from(arguments, __doc__)
    with tempfile.TemporaryDirectory() as folder:
        rows = capture(model, Path(folder), questions(TOPICS), TOKENS)
        head = train(model, rows, Path(folder) / "heads", "--epochs=4")
        losses = losses_of(head.parent)
        length = acceptance(model, head, questions(HELD_OUT), TOKENS)["length"]
    show(
        "A head that guesses three tokens, on questions that it has not seen",
        ["loss after the first epoch", "after the best", "acceptance length, of at most 4"],
        [[losses[0], losses[-1], length]],
    )
    return {"losses": losses, "length": length}


def questions(topics: Sequence[str], forms: Sequence[str] = FORMS) -> list[str]:
    """Return a question of each form about each topic."""
    return [form.format(topic) for topic in topics for form in forms]


def capture(model: Path, folder: Path, asked: Sequence[str], max_tokens: int) -> Path:
    """Have the model answer, and return the folder of the export for speculators."""
    lines = [json.dumps({"messages": chat}) + "\n" for chat in as_chats(asked)]
    (folder / "questions.jsonl").write_text("".join(lines))
    job = Job(
        model=str(model),
        data=str(folder / "questions.jsonl"),
        out=str(folder / "store"),
        dtype="float32",
        chat=True,
        roles=True,  # the loss is of what the model says
        capture=Capture([*LAYERS, LAST], positions="all"),
        max_tokens=max_tokens,
        engine_args=ENGINE,
    )
    with defaults(ALWAYS), quiet(verbose=False):
        summary = capture_dataset(job)
    assert summary.status == 0, summary
    taps = [f"resid_post.{layer}" for layer in (*LAYERS, LAST)]
    return export(open_store(folder / "store"), folder / "rows", "speculators", join=taps).path


def train(model: Path, rows: Path, out: Path, *options: str) -> Path:
    """Run speculators' trainer, and return the folder of the head."""
    command = [sys.executable, "-m", "midstream.lab.export.online", *SMALL, *ON_CPU]
    # vLLM and speculators number what a layer reads: one more than what it gave.
    layers = [str(layer + 1) for layer in LAYERS]
    command += [f"--verifier-name-or-path={model}", f"--data-path={rows}", f"--save-path={out}"]
    command += ["--target-layer-ids", *layers, "--on-missing=raise", f"--log-dir={out}-log"]
    subprocess.run([*command, *options], check=True, stdout=subprocess.DEVNULL)
    return out if "--dry-run" in options else (out / "checkpoint_best").resolve()


def losses_of(out: Path) -> list[float]:
    """Return the loss of what was held out after each epoch that was better than those before."""
    files = sorted(out.glob("[0-9]*/val_metrics.json"), key=lambda path: int(path.parent.name))
    return [json.loads(path.read_text())["loss_epoch"] for path in files]


def acceptance(
    model: Path, head: Path, asked: Sequence[str], max_tokens: int
) -> dict[str, int | float]:
    """Return vLLM's counts, and its mean acceptance length: tokens that a step of the model gives,
    of which one is its own.
    """
    drafts = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3}
    with defaults(ALWAYS), quiet(verbose=False):
        llm = LLM(
            str(model),
            speculative_config=drafts,
            midstream={"sites": ["resid_post"]},
            dtype="float32",
            disable_log_stats=False,
            **ENGINE,
        )
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    outputs = llm.chat(as_chats(asked), params, use_tqdm=False, capture=[LAST])
    assert all(output.receipt.status == "ok" for output in outputs)
    counts = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    accepted = counts["vllm:spec_decode_num_accepted_tokens"]
    steps = counts["vllm:spec_decode_num_drafts"]
    return {"drafts": steps, "accepted": accepted, "length": 1 + accepted / steps}


if __name__ == "__main__":
    main()
