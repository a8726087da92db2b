"""Controllers that engines of tests have by the setting `controllers`."""

import threading
from typing import Any

LET_GO = threading.Event()


class Script:
    """Chooses other edits in its third call, half of the request's own in its fifth, and stops in
    its seventh.
    """

    answers: tuple[Any, ...] = (
        None, 1.0, {"edits": "calm"}, None, {"edits": "", "scale": 0.5}, 0.5, {"stop": True},
    )  # fmt: skip

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, observed: Any) -> Any:
        self.calls += 1
        assert observed.tokens == self.calls, "each completion has a controller of its own"
        assert len(observed.scores["p"]) >= 1
        return self.answers[self.calls - 1]


class Sign:
    """Half the strength while its last score is negative."""

    def __call__(self, observed: Any) -> float:
        return 0.5 if float(observed.scores["p"][-1]) < 0 else 1.0


def halving(observed: Any) -> float:
    """Halve the scale after each three tokens, six times."""
    return float(0.5 ** min(observed.tokens // 3, 6))


def raises(observed: Any) -> None:
    """Raise in the third call."""
    if observed.tokens == 3:
        raise KeyError("nothing here")


def hangs(observed: Any) -> None:
    """Hang in the third call."""
    if observed.tokens == 3:
        LET_GO.wait(60)


def nonsense(observed: Any) -> Any:
    """Answer with text in the third call."""
    return "much" if observed.tokens == 3 else None


def unknown_scale(observed: Any) -> Any:
    """Answer with a scale that was not declared, in the third call."""
    return 0.3 if observed.tokens == 3 else None


def limit(observed: Any) -> Any:
    """Stop after nine tokens, or some more of the same step."""
    return {"stop": True} if observed.tokens >= 9 else None


HERE = "support.controlling:"
DECLARED: dict[str, Any] = {
    "script": {"path": HERE + "Script", "scales": [0.5], "seconds": 5},
    "sign": {"path": HERE + "Sign", "scales": [0.5], "seconds": 5},
    "halving": {
        "path": HERE + "halving",
        "scales": [0.5**n for n in range(1, 7)],
        "seconds": 5,
    },
    "limit": HERE + "limit",
    "raises": HERE + "raises",
    "hangs": {"path": HERE + "hangs", "seconds": 0.05, "on_error": "off"},
    "nonsense": {"path": HERE + "nonsense", "on_error": "end"},
    "unknown_scale": HERE + "unknown_scale",
}
