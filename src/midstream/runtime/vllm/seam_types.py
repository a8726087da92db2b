"""What a seam is: a place of vLLM's that midstream wraps, calls, reads or sets, as data."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Seam:
    """One function of vLLM that midstream wraps or calls.

    Attributes:
        module, name: where it is (`Class.method`).
        parameters: the leading parameters, by name, after `self`.
        why: what midstream does there.
        named: parameters that are given by name, wherever they are.
        at: for methods of a model runner, where on it they are.
    """

    module: str
    name: str
    parameters: tuple[str, ...]
    why: str
    named: tuple[str, ...] = ()
    at: str = ""


@dataclass(frozen=True, slots=True)
class Fields:
    """Attributes of one class of vLLM's, or of a module.

    Attributes:
        module, owner: the class; "" for the module itself.
        names: declared in the body of the class or of one of its bases, or set on its objects.
        why: what midstream does with them.
        at: where on a model runner the object is; None for what no runner has.
        since, until: the first and the last release that has them, as "0.30"; "" for all.
    """

    module: str
    owner: str
    names: tuple[str, ...]
    why: str
    at: str | None = None
    since: str = ""
    until: str = ""

    def is_in(self, version: str) -> bool:
        """Whether a release has them, as far as is known."""
        now = _release(version)
        begun = not self.since or _release(self.since) <= now
        return begun and (not self.until or now <= _release(self.until))


def _release(version: str) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", version)
    # What has no number was built from newer sources than any release.
    return (int(found[1]), int(found[2])) if found else (10**6, 0)
