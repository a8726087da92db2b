"""Capture, steer and probe over HTTP: directions from a server's rows, registered and used there.

Start a server on this machine first, then run this file:

midstream serve .models/SmolLM2-135M-Instruct --port 8000 --host 127.0.0.1
python examples/online_serving_client.py --model .models/SmolLM2-135M-Instruct
"""

from __future__ import annotations

import argparse

from rich.console import Console

from midstream import Capture, Client, Probe, Steer

GLAD = ["I won the prize. I feel wonderful.", "What a lovely day, everyone is happy."]
SAD = ["I lost the prize. I feel terrible.", "What an awful day, everyone is miserable."]
QUESTION = "How was your day?"


def main() -> None:
    """Run the example against the server of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", required=True, help="as the server was started with it")
    parser.add_argument("--layer", type=int, default=14)
    given = parser.parse_args()

    console = Console(markup=False, highlight=False)
    with Client(given.url) as client:

        def mean_of(texts: list[str]):  # type: ignore[no-untyped-def]
            rows = []
            for text in texts:
                out = client.complete(
                    text,
                    model=given.model,
                    max_tokens=1,
                    capture=Capture(layers=[given.layer], positions="last_prompt"),
                )
                rows.append(out.activations["resid_post", given.layer][0])
            return sum(rows) / len(rows)

        mood = mean_of(GLAD) - mean_of(SAD)
        client.vectors.register("glad", {given.layer: mood})
        for scale in (None, -1.0, 1.0):
            out = client.chat(
                [{"role": "user", "content": QUESTION}],
                model=given.model,
                max_tokens=30,
                temperature=0,
                steer=None if scale is None else Steer("glad", scale=scale),
                probes=Probe(mood, layer=given.layer, name="glad", phase="generated"),
            )
            score = float(out.probes["glad"].mean())
            console.print(
                f"scale {scale}: probe {score:.1f}, receipt {out.receipt.status}: {out.text!r}"
            )
        client.vectors.remove("glad")


if __name__ == "__main__":
    main()
