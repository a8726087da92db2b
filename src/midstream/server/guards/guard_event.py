"""`GuardEvent`: a guard acted on one completion."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class GuardEvent:
    """A guard acted.

    Attributes:
        guard, version: its name and version.
        action: what it did.
        position: of the token whose score met the condition, prompt first; None: it has no probe.
        score: the pooled score there; None: it has no probe.
        request_id: vLLM's id of the request.
        completion: index of the completion, with n > 1.
        client: fingerprint of the client's API key, or its address.
        model: the model or adapter.
        text: the end of the generated text; None: the guard does not ask for it.
        problem: why its probe could not read the answer; None: it has, or there is none.
    """

    guard: str
    version: int
    action: str
    position: int | None
    score: float | None
    request_id: str
    completion: int
    client: str
    model: str
    text: str | None = None
    problem: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}
