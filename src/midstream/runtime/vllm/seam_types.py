"""Seams as data: places in vLLM that midstream wraps, calls, reads or sets."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Seam:
    """A function of vLLM that midstream wraps or calls.

    Attributes:
        module, name: the function; `Class.method` for a method.
        parameters: names of its leading parameters after `self`.
        why: what midstream does there.
        named: parameters that midstream passes by name.
        at: path of the method on a model runner; "" for other functions.
        called: whether midstream calls it with these parameters alone, so that it may require no
            others; else midstream passes on what it is given.
    """

    module: str
    name: str
    parameters: tuple[str, ...]
    why: str
    named: tuple[str, ...] = ()
    at: str = ""
    called: bool = False


@dataclass(frozen=True, slots=True)
class Fields:
    """Attributes of a class or a module of vLLM.

    Attributes:
        module, owner: the class; an empty `owner` stands for the module.
        names: attributes declared in the class or a base, or set on its objects by a method.
        why: what midstream does with them.
        at: path of the object on a model runner; None: it is not on one.
        since, until: first and last release with these attributes, such as "0.30"; "" for all.
    """

    module: str
    owner: str
    names: tuple[str, ...]
    why: str
    at: str | None = None
    since: str = ""
    until: str = ""

    def is_in(self, version: str) -> bool:
        """Return whether a release has these attributes, as far as known."""
        now = _release(version)
        begun = not self.since or _release(self.since) <= now
        return begun and (not self.until or now <= _release(self.until))


def _release(version: str) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", version)
    # A version without a number was built from newer sources than any release.
    return (int(found[1]), int(found[2])) if found else (10**6, 0)
