"""EAGLE-3 heads trained by speculators on rows of a store and of a server, as vLLM accepts them.

    python benchmarks/draft_head.py [--epochs 10] [--tokens 64] [--json FILE]

SmolLM2-135M-Instruct answers questions of six forms about 16 topics. A head is trained on the rows
of a store, another one, with the same seed, on those that a server sends meanwhile. vLLM then
drafts three tokens a step in answers to the same forms about six other topics, at temperature 0,
with midstream on, which captures the last layer of each token. The acceptance length is vLLM's: 1 +
accepted tokens / drafts. `untrained` is the head before the first step. Needs speculators;
examples/train_draft.py does the work.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
sys.path.insert(0, str(Path(__file__).parent))

import engines
import train_draft

TOPICS = [*train_draft.TOPICS, "music", "books", "gardens", "bridges", "apples", "whales"]
HELD_OUT = [*train_draft.HELD_OUT, "bicycles", "chess"]
FORMS = [
    *train_draft.FORMS,
    "Write a short story about {}.",
    "What should a beginner know about {}?",
    "What is the history of {}?",
]
PORT = 8731


def main() -> int:
    """Train and measure each head, write the JSON after each, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--json", type=Path)
    parser.set_defaults(rounds=1, seconds=None)
    args = parser.parse_args()
    from midstream.lab.demo.model.smollm2 import NAME, make_smollm2

    model = args.model or make_smollm2(Path(".models") / NAME)
    asked = train_draft.questions(TOPICS, FORMS)
    held_out = train_draft.questions(HELD_OUT, FORMS)
    about = {"model": model.name, "answers": len(asked), "held_out": len(held_out)}
    run = engines.Run("draft_head", args, **about, tokens=args.tokens, epochs=args.epochs, heads={})
    with run.limited(), tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run.stage("capture")
        rows = train_draft.capture(model, folder, asked, args.tokens)
        epochs = (f"--epochs={args.epochs}",)
        for head, options in {
            "untrained": ("--dry-run",),
            "rows of a store": epochs,
            "rows of a server": (*epochs, *served_options()),
        }.items():
            run.stage(head)
            out = folder / head.replace(" ", "-")
            began = time.monotonic()
            if "server" in head:
                # It gets no rows of the store: only the tokens of the answers.
                (rows / "hidden_states").rename(folder / "kept")
                with served(model):
                    trained = train_draft.train(model, rows, out, *options)
            else:
                trained = train_draft.train(model, rows, out, *options)
            seconds = time.monotonic() - began
            counts = train_draft.acceptance(model, trained, held_out, args.tokens)
            losses = train_draft.losses_of(out)
            run.results["heads"][head] = {**counts, "losses": losses, "train_s": seconds}
            run.save()
            run.stage(f"{head}: {run.results['heads'][head]}")
    return run.finish()


def served_options() -> list[str]:
    """Return the options of training on rows of the server."""
    taps = ",".join(f"resid_post.{layer}" for layer in (*train_draft.LAYERS, train_draft.LAST))
    url = f"--midstream-url=http://127.0.0.1:{PORT}"
    return ["--hidden-states-backend=midstream", url, f"--midstream-taps={taps}"]


@contextmanager
def served(model: Path) -> Iterator[None]:
    """Run a server of the model, and end it."""
    options = ["--port", str(PORT), "--host=127.0.0.1", "--sites=resid_post", "--dtype=float32"]
    options += ["--enforce-eager", "--max-model-len=512"]
    command = [sys.executable, "-m", "midstream", "serve", str(model), *options]
    with subprocess.Popen(command) as process:
        try:
            for _ in range(600):
                if process.poll() is not None or _answers():
                    break
                time.sleep(1)
            yield
        finally:
            process.terminate()


def _answers() -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(main())
