"""Results of a request without what the server's guards added to them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from midstream.results.receipt import Receipt
from midstream.steering.guard_definition import is_probe_of_guard

# In place of the probe of a guard that switched the edits.
_SOURCE = "server"


def hide(completion: Any, guards: int, is_asked: bool) -> None:
    """Remove the scores and the acts of a number of guards, the last server-wide parts, from a
    completion. `is_asked`: the request has a plan; else it has no receipt for them alone.
    """
    if completion.probes is not None:
        own = [name for name in completion.probes if not is_probe_of_guard(name)]
        completion.probes = completion.probes.only(own) if own else None
    receipt: Receipt | None = completion.receipt
    if receipt is None:
        return
    paths = {f"steering[{index}]" for index in range(-guards, 0)}
    is_hidden = is_probe_of_guard
    receipt = replace(
        receipt,
        probed=tuple(probed for probed in receipt.probed if not is_hidden(probed.name)),
        selected=tuple(part for part in receipt.selected if part.what not in paths),
        actions=tuple(action for action in receipt.actions if not is_hidden(action.name)),
        versions=tuple(
            replace(version, source=_SOURCE)
            if is_hidden(version.source.removeprefix("probe:"))
            else version
            for version in receipt.versions
        ),
    )
    is_empty = not (receipt.probed or receipt.selected or receipt.captured or receipt.problems)
    completion.receipt = None if is_empty and not is_asked else receipt
