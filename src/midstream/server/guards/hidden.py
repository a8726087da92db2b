"""Results of a request without what the server's guards added to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from midstream.plan.probe import Probe
from midstream.results.receipt import Receipt

# In place of the probe of a guard that switched the edits.
_SOURCE = "server"


def hide(completion: Any, guards: Sequence[Probe], is_asked: bool) -> None:
    """Remove the scores and the acts of guards, the last server-wide parts, from a completion.
    `is_asked`: the request has a plan; else it has no receipt for them alone.
    """
    names = {guard.name for guard in guards}
    if completion.probes is not None:
        own = [name for name in completion.probes if name not in names]
        completion.probes = completion.probes.only(own) if own else None
    receipt: Receipt | None = completion.receipt
    if receipt is None:
        return
    paths = {f"steering[{index}]" for index in range(-len(guards), 0)}
    receipt = replace(
        receipt,
        probed=tuple(probed for probed in receipt.probed if probed.name not in names),
        selected=tuple(part for part in receipt.selected if part.what not in paths),
        actions=tuple(action for action in receipt.actions if action.name not in names),
        versions=tuple(
            replace(version, source=_SOURCE)
            if version.source.removeprefix("probe:") in names
            else version
            for version in receipt.versions
        ),
    )
    is_empty = not (receipt.probed or receipt.selected or receipt.captured or receipt.problems)
    completion.receipt = None if is_empty and not is_asked else receipt
