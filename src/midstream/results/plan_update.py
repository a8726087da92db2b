"""`PlanUpdate`: from where on a running request has other edits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class PlanUpdate:
    """Answer to an update of a running request.

    Attributes:
        version: number of the new version of the request's plan, at least 1.
        positions: by index of the completion, the first position at which it holds: the first that
            was not scheduled when the update arrived. Without completions that had ended.
    """

    version: int
    positions: dict[int, int]

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return {
            "version": self.version,
            "choices": [
                {"index": index, "position": position}
                for index, position in sorted(self.positions.items())
            ],
        }

    @staticmethod
    def from_dict(plain: dict[str, Any]) -> PlanUpdate:
        """Create from the values of `to_dict`."""
        return PlanUpdate(
            plain["version"], {choice["index"]: choice["position"] for choice in plain["choices"]}
        )
