"""Steer a server over HTTP by a direction from captured rows: by request, by name, for every one.

Start a server first; this program needs neither vLLM nor torch:

    midstream serve MODEL --port 8000
    python examples/steering_client.py [--url http://127.0.0.1:8000] [--key ADMIN_KEY]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from midstream import Capture, Client, Steer

GLAD = "I won the prize. I feel wonderful."
SAD = "I lost the prize. I feel terrible."
QUESTION = "How was your day?"
NAME = "glad"


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Print how the answer changes, and return the answers by what steered them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--key", help="admin key, if the server has one")
    parser.add_argument("--layer", type=int, default=14)
    parser.add_argument("--scale", type=float, default=1.0)
    given = parser.parse_args(arguments)
    layer, scale = given.layer, given.scale
    answers: dict[str, Any] = {}
    with Client(given.url, admin_key=given.key) as client:

        def ask(how: str, **asked: Any) -> None:
            found = client.complete(QUESTION, max_tokens=24, temperature=0, **asked)
            answers[how] = found.outputs[0].text
            sys.stdout.write(f"{how:22} {answers[how]!r}\n")

        last = Capture(layers=[layer], positions="last_prompt")
        glad, sad = (
            client.complete(text, max_tokens=1, capture=last).activations["resid_post", layer][0]
            for text in (GLAD, SAD)
        )
        direction = (glad - sad).tolist()
        ask("plain")
        ask("by request", steer=Steer(direction, layer=layer, scale=scale))
        client.vectors.register(NAME, {layer: direction})
        try:
            ask("by name", steer=Steer(NAME, scale=scale))
        finally:
            client.vectors.remove(NAME)
        # The same as `client.steering.set(base=…)`, at the path of the vLLM fork.
        vectors = {"post_block": {str(layer): {"vector": direction, "scale": scale}}}
        client.call("POST", "/v1/steering/set", {"vectors": vectors})
        try:
            ask("for every request")
            sys.stdout.write(f"{client.call('GET', '/v1/steering')}\n")
        finally:
            client.call("POST", "/v1/steering/clear", {})
        ask("after it was cleared")
    return answers


if __name__ == "__main__":
    main()
