"""The report's interface to an engine; its only module that uses `midstream.LLM`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from midstream.plan import Sites
from midstream.plan.forms import PositionWord

SITE = "resid_post"


@dataclass(frozen=True)
class Push:
    """Add `scale * vector`, float32 `[hidden]`, to the stream after `layer` at every token."""

    vector: torch.Tensor
    layer: int
    scale: float


@dataclass(frozen=True)
class Request:
    """One prompt, and what to capture and steer."""

    name: str
    token_ids: list[int]
    max_tokens: int = 1  # at temperature 0
    capture: PositionWord | None = None  # positions at all layers; None: none
    push: Push | None = None


@dataclass(frozen=True)
class EngineReply:
    """The result of one request."""

    text: str
    rows: torch.Tensor | None  # float32 `[layers, rows, hidden]`; None: not captured
    token_ids: list[int]
    output_ids: list[int]
    receipt: dict[str, Any] | None  # None: neither captured nor steered


class ReportEngine(Protocol):
    """The interface that the run needs."""

    tokenizer: Any
    max_length: int
    """Most tokens of a request, prompt and answer together."""

    def run(self, requests: Sequence[Request]) -> list[EngineReply]:
        """Run all requests in one batch, and return the replies in the same order."""
        ...

    def score(self, texts: list[list[int]], prompts: list[list[int]]) -> list[float]:
        """Return the mean log-probability in nats of the tokens of each text after its prompt."""
        ...


class MidstreamEngine:
    """`midstream.LLM` with every layer's `resid_post` tapped."""

    def __init__(
        self, model: Path | str, *, seed: int, compiled: bool, max_length: int = 512
    ) -> None:
        from midstream import LLM

        on_gpu = torch.cuda.is_available()
        self.arguments: dict[str, Any] = {
            "dtype": "bfloat16" if on_gpu else "float32",
            "max_model_len": max_length,
            "enforce_eager": not (compiled or on_gpu),
            "seed": seed,
        }
        self.max_length = max_length
        self.device = torch.cuda.get_device_name() if on_gpu else "CPU"
        self._llm = LLM(
            str(model),
            midstream={"sites": [SITE], "layers": "all"},
            disable_log_stats=True,
            **self.arguments,
        )
        self.tokenizer = self._llm.get_tokenizer()

    def run(self, requests: Sequence[Request]) -> list[EngineReply]:
        from midstream import Capture, SamplingParams, Steer

        outputs = self._llm.generate(
            [{"prompt_token_ids": request.token_ids} for request in requests],
            [SamplingParams(temperature=0, max_tokens=r.max_tokens) for r in requests],
            capture=[
                Capture(layers="all", sites=Sites(SITE), positions=r.capture) if r.capture else None
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

    def score(self, texts: list[list[int]], prompts: list[list[int]]) -> list[float]:
        return [score.mean for score in self._llm.score(texts, prompts)]


def _reply(output: Any) -> EngineReply:
    acts, rows, token_ids = getattr(output, "activations", None), None, []
    if acts is not None and acts.layers:
        rows = torch.stack([acts[SITE, layer].float() for layer in acts.layers])
        token_ids = [int(token) for token in acts.token_ids]
    receipt = output.receipt.to_dict() if hasattr(output, "receipt") else None
    return EngineReply(
        output.outputs[0].text, rows, token_ids, list(output.outputs[0].token_ids), receipt
    )
