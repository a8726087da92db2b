"""What libraries look up again for each import, client or call: a process of tests does it once."""

import functools
import importlib.metadata
import ssl
import sys
from collections import defaultdict
from typing import Any

from _pytest.assertion.rewrite import AssertionRewritingHook

# Packages of thousands of modules, none of which pytest rewrites.
_FOREIGN = {
    *("midstream", "networkx", "numpy", "openai", "pandas", "ray", "scipy", "sklearn", "sympy"),
    *("torch", "torchvision", "transformers", "triton", "vllm"),
}
_default_context = ssl.create_default_context
_all_entry_points = importlib.metadata.entry_points
_bails_out = AssertionRewritingHook._early_rewrite_bailout


@functools.cache
def _context_of(cafile: str) -> ssl.SSLContext:
    return _default_context(cafile=cafile)


def create_default_context(
    purpose: ssl.Purpose = ssl.Purpose.SERVER_AUTH, **given: Any
) -> ssl.SSLContext:
    """Return the context of a file of certificates as httpx asks for it: one for all clients."""
    if purpose is ssl.Purpose.SERVER_AUTH and list(given) == ["cafile"]:
        import certifi

        if given["cafile"] == certifi.where():
            return _context_of(given["cafile"])
    return _default_context(purpose, **given)


@functools.cache
def _entry_points_in(path: tuple[str, ...]) -> Any:
    return _all_entry_points()


def entry_points(**given: Any) -> Any:
    """Return entry points. The files of all packages are read once for each `sys.path`."""
    return _entry_points_in(tuple(sys.path)).select(**given)


def packages_distributions() -> dict[str, list[str]]:
    """Return the distributions of each package, as importlib.metadata does with a path for each
    of their files.
    """
    found = defaultdict(list)
    for each in importlib.metadata.distributions():
        tops = set((each.read_text("top_level.txt") or "").split())
        if not tops:
            lines = (each.read_text("RECORD") or "").splitlines()
            files = [line.partition(",")[0] for line in lines]
            tops = {
                file.partition("/")[0].removesuffix(".py") for file in files if file.endswith(".py")
            }
        for top in tops:
            found[top].append(each.metadata["Name"])
    return dict(found)


def _early_rewrite_bailout(self: AssertionRewritingHook, name: str, state: Any) -> bool:
    return name.partition(".")[0] in _FOREIGN or _bails_out(self, name, state)


def install() -> None:
    """Have libraries use this, if it is called before they are imported."""
    ssl.create_default_context = create_default_context
    importlib.metadata.entry_points = entry_points
    importlib.metadata.packages_distributions = packages_distributions
    AssertionRewritingHook._early_rewrite_bailout = _early_rewrite_bailout  # type: ignore[method-assign]
