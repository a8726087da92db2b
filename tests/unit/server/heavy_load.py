"""Eight clients that send the worst allowed bodies, and one that asks for `/health` meanwhile."""

from __future__ import annotations

import base64
import importlib.util
import json
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
from support.long_lists import edits, texts

from midstream.compat.packed_arrays import MAX_NUMBERS

V = [1.0, 2.0, 2.0]
PROMPT = "the cat con " * 500  # several thousand tokens


def _completion(prompt: Any = PROMPT, **field: Any) -> tuple[str, bytes]:
    return "/v1/completions", json.dumps({"prompt": prompt, "midstream": field}).encode()


def _captures(count: int, **more: Any) -> list[dict[str, Any]]:
    return [{"layers": [nth % 32], "positions": [nth], **more} for nth in range(count)]


def _chat(count: int) -> tuple[str, bytes]:
    messages = [{"role": "user", "content": f"word {nth % 7} <x>"} for nth in range(count)]
    field = {"capture": {"layers": [1], "positions": [{"role": "user", "message": "all"}]}}
    return "/v1/chat/completions", json.dumps({"messages": messages, "midstream": field}).encode()


def _compressed() -> tuple[str, bytes]:
    """As many numbers as compressed arrays may have together, in some kB."""
    library = importlib.import_module("zstandard")
    size = MAX_NUMBERS // 16
    numbers = np.ones(size, np.float32).tobytes()
    data = base64.b64encode(library.ZstdCompressor().compress(numbers)).decode()
    array = {"data": data, "shape": [1, size], "compression": "zstd"}
    vectors = [{"activations": array, "layer_indices": [nth]} for nth in range(16)]
    return "/v1/completions", json.dumps(
        {"prompt": "a", "apply_steering_vectors": vectors}
    ).encode()


# Bodies that are allowed, or refused as late as any: what each costs most.
WORST: dict[str, Callable[[], tuple[str, bytes]]] = {
    "texts": lambda: _completion(capture={"layers": [1], "exclude": texts(4000)}),
    "captures with texts": lambda: _completion(
        "the cat con " * 40,
        capture=[
            {"layers": [1], "positions": [nth], "exclude": [*texts(300), {"text": f"x{nth}"}]}
            for nth in range(60)
        ],
    ),
    "texts of all lengths": lambda: _completion(
        "a" * 6000, capture={"layers": [1], "exclude": [{"text": "a" * n} for n in range(1, 40)]}
    ),
    "edits": lambda: _completion(edits=edits(1000)),
    "captures of all layers": lambda: _completion(capture=_captures(500, layers="all")),
    "probes": lambda: _completion(
        probes=[
            {"direction": V, "layer": nth % 32, "name": f"p{nth}", "positions": [nth]}
            for nth in range(1000)
        ]
    ),
    "prompts": lambda: _completion(
        ["the cat con " * 40 + str(nth) for nth in range(10)],
        capture=[
            {"layers": [1], "positions": [nth], "exclude": texts(300)} for nth in range(20)
        ],
    ),
    "numbers": lambda: _completion("a", edits=[{"op": "steer", "vector": [0.5] * 260_000}]),
    "chat": lambda: _chat(400),
    **({"compressed": _compressed} if importlib.util.find_spec("zstandard") else {}),
}  # fmt: skip


def main(url: str, seconds: float, clients: int, names: list[str]) -> dict[str, Any]:
    bodies = {name: WORST[name]() for name in names}
    statuses: dict[str, list[int]] = {name: [] for name in names}
    kind = {"content-type": "application/json"}
    began = 0.0

    def work(first: int) -> None:
        with httpx.Client(base_url=url, timeout=600) as client:
            nth = first
            while time.monotonic() < began + seconds:
                name = names[nth % len(names)]
                path, body = bodies[name]
                statuses[name].append(client.post(path, content=body, headers=kind).status_code)
                nth += 1

    waits = []
    threads = [threading.Thread(target=work, args=(nth,)) for nth in range(clients)]
    with httpx.Client(base_url=url, timeout=600) as client:
        client.get("/health")  # what is done once is done
        began = time.monotonic()
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            asked = time.monotonic()
            client.get("/health").raise_for_status()
            waits.append(time.monotonic() - asked)
            time.sleep(0.02)
    return {"longest": max(waits), "asked": len(waits), "statuses": statuses}


if __name__ == "__main__":
    address, duration, number, *chosen = sys.argv[1:]
    result = main(address, float(duration), int(number), chosen or list(WORST))
    sys.stdout.write(json.dumps(result))
