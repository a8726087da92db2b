"""The demo's view of an engine: requests in, replies out. Only here is midstream.LLM used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

SITE = "resid_post"


@dataclass(frozen=True)
class Push:
    """Add `scale * vector` to the stream after `layer`, at every token, the prompt's included.

    Attributes:
        vector: float32 `[hidden]`.
    """

    vector: torch.Tensor
    layer: int
    scale: float


@dataclass(frozen=True)
class Request:
    """One prompt and what is wanted of it.

    Attributes:
        name: for its receipt.
        token_ids: the prompt.
        max_tokens: how many to generate, at temperature 0.
        capture: positions to capture at all layers, as midstream names them; None for none.
        push: how to steer it; None for not at all.
    """

    name: str
    token_ids: list[int]
    max_tokens: int = 1
    capture: str | None = None
    push: Push | None = None


@dataclass(frozen=True)
class Reply:
    """What came of one request.

    Attributes:
        text: what the model wrote.
        rows: float32 `[layers, rows, hidden]`; None when nothing was captured.
        token_ids: of the rows.
        receipt: midstream's, as plain values; None for a request that asked nothing of it.
    """

    text: str
    rows: torch.Tensor | None
    token_ids: list[int]
    receipt: dict[str, Any] | None


class Engine(Protocol):
    """What the demo's run needs."""

    tokenizer: Any

    def run(self, requests: Sequence[Request]) -> list[Reply]:
        """All requests in one batch; replies in their order."""
        ...


class MidstreamEngine:
    """`midstream.LLM` with every layer's `resid_post` tapped."""

    def __init__(self, model: Path | str, *, seed: int, compiled: bool) -> None:
        from midstream import LLM

        on_gpu = torch.cuda.is_available()
        self.arguments: dict[str, Any] = {
            "dtype": "bfloat16" if on_gpu else "float32",
            "max_model_len": 512,
            "enforce_eager": not (compiled or on_gpu),
            "seed": seed,
        }
        self.device = torch.cuda.get_device_name() if on_gpu else "CPU"
        self._llm = LLM(
            str(model),
            midstream={"sites": [SITE], "layers": "all"},
            disable_log_stats=True,
            **self.arguments,
        )
        self.tokenizer = self._llm.get_tokenizer()

    def run(self, requests: Sequence[Request]) -> list[Reply]:
        from midstream import Capture, SamplingParams, Steer

        outputs = self._llm.generate(
            [{"prompt_token_ids": request.token_ids} for request in requests],
            [SamplingParams(temperature=0, max_tokens=r.max_tokens) for r in requests],
            capture=[
                Capture(layers="all", sites=SITE, positions=r.capture) if r.capture else None
                for r in requests
            ],
            steer=[
                [Steer(r.push.vector, layer=r.push.layer, scale=r.push.scale, phase="all")]
                if r.push
                else None
                for r in requests
            ],
            use_tqdm=False,
        )
        return [_reply(output) for output in outputs]


def _reply(output: Any) -> Reply:
    acts, rows, token_ids = output.activations, None, []
    if acts is not None and acts.layers:
        rows = torch.stack([acts[SITE, layer].float() for layer in acts.layers])
        token_ids = [int(token) for token in acts.token_ids]
    receipt = output.receipt.to_dict() if output.receipt is not None else None
    return Reply(output.outputs[0].text, rows, token_ids, receipt)
