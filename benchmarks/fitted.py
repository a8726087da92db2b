"""Tables of what was fitted or trained on captured rows."""

from __future__ import annotations

from typing import Any

import markers
from figures import where


def probes(result: dict[str, Any]) -> str:
    """Render a result of probes.py: what held-out texts say of each kind of probe."""

    def shown(interval: list[float]) -> str:
        value, low, high = interval
        return f"{value:.3f} ({low:.3f} to {high:.3f})"

    rows = [
        [name, *(shown(one[rate]) for rate in ("auc", "tpr", "fpr")), f"{one['brier']:.3f}"]
        for name, one in result["kinds"].items()
    ]
    target = f"{result['fpr']:.0%}"
    columns = ["AUC", f"TPR at a target of {target} FPR", "FPR of held-out texts", "Brier"]
    head = [f"{result['model']}, layer {result['layer']}, {result['texts']} texts", *columns]
    # One round: a fit with a seed gives the same.
    once = {name: part for name, part in result.items() if name != "rounds"}
    return "\n\n".join([where(once), markers.table(head, rows, numbers=True)])


def draft_head(result: dict[str, Any]) -> str:
    """Render a result of draft_head.py: what vLLM accepts of each head."""
    rows = [
        [
            name,
            " → ".join(f"{one['losses'][at]:.1f}" for at in (0, -1)) if one["losses"] else "",
            f"{one['drafts']:,}",
            f"{one['accepted']:,}",
            f"{one['length']:.2f}",
        ]
        for name, one in result["heads"].items()
    ]
    about = f"{result['answers']} answers of {result['tokens']} tokens, {result['epochs']} epochs"
    head = [f"{result['model']}, {about}", "held-out loss, first epoch → best"]
    head += ["drafts", "accepted", "1 + accepted / drafts"]
    # One round: every answer is at temperature 0.
    once = {name: part for name, part in result.items() if name != "rounds"}
    return "\n\n".join([where(once), markers.table(head, rows, numbers=True)])
