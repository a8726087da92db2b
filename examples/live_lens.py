"""Watch what each layer would say next, while the model writes.

The logit lens, nostalgebraist 2020: the stream of each layer goes through the model's own final
norm and head. The rows arrive with the tokens of the stream.

    python examples/live_lens.py [--model FOLDER]
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import model_from
from rich.console import Console
from rich.live import Live
from rich.text import Text

from midstream import Lens
from midstream.console import ALWAYS, defaults, quiet

PROMPT = "The capital of France is"
LAYERS, TOKENS, SHOWN = range(0, 30, 3), 16, 4


def table(text: str, rows: Any, decode: Any) -> Text:
    """Return the most likely token of each layer after the last few tokens, last layer first."""
    lines = [text.replace("\n", "⏎"), ""]
    for nth, layer in reversed(list(enumerate(rows.layers))):
        ids, chances = rows.ids[-SHOWN:, nth, 0], rows.logprobs[-SHOWN:, nth, 0].exp()
        cells = [
            f"{decode([token])!r:>12.12} {chance:4.0%}"
            for token, chance in zip(ids.tolist(), chances.tolist(), strict=True)
        ]
        lines.append(f"{layer:>3} {'  '.join(cells)}")
    return Text("\n".join(lines), no_wrap=True)


async def watch(model: Path) -> dict[str, Any]:
    """Generate, and show a table after each output; return the text and the last layer's tokens."""
    from vllm.sampling_params import RequestOutputKind

    from midstream import AsyncLLM, SamplingParams

    with defaults(ALWAYS), quiet(verbose=False):
        llm = AsyncLLM(
            str(model), dtype="auto", max_model_len=512, enforce_eager=True, disable_log_stats=True
        )
        await llm.ready()
    lens = Lens([*LAYERS, -1], top=1, positions=["last_prompt", "generated"], stream=True)
    params = SamplingParams(
        temperature=0, max_tokens=TOKENS, output_kind=RequestOutputKind.CUMULATIVE
    )
    decode, updates, rows = llm.get_tokenizer().decode, 0, None
    try:
        with Live(console=Console(), auto_refresh=False) as live:
            async for output in llm.generate(PROMPT, params, "watch", capture=lens):
                if output.lens is not None:
                    rows, updates = output.lens["logit"], updates + 1
                    live.update(table(PROMPT + output.outputs[0].text, rows, decode), refresh=True)
    finally:
        llm.shutdown()
    assert rows is not None
    ids = output.outputs[0].token_ids
    return {"updates": updates, "said": list(ids), "last_layer": rows.ids[:, -1, 0].tolist()}


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    return asyncio.run(watch(model_from(arguments, __doc__)))


if __name__ == "__main__":
    found = main(sys.argv[1:])
    if found["said"] != found["last_layer"]:
        sys.exit(f"the last layer said something else: {found}")
