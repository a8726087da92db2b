"""What libraries look up again for each client or import: a process of tests does it once."""

import functools
import ssl
from typing import Any

from _pytest.assertion.rewrite import AssertionRewritingHook

# Packages of thousands of modules, none of which pytest rewrites.
_FOREIGN = {
    *("midstream", "networkx", "numpy", "openai", "pandas", "ray", "scipy", "sklearn", "sympy"),
    *("torch", "torchvision", "transformers", "triton", "vllm"),
}
_default_context = ssl.create_default_context
_bails_out = AssertionRewritingHook._early_rewrite_bailout


@functools.cache
def _context_of(cafile: str) -> ssl.SSLContext:
    return _default_context(cafile=cafile)


def create_default_context(
    purpose: ssl.Purpose = ssl.Purpose.SERVER_AUTH, **given: Any
) -> ssl.SSLContext:
    """Return the context of a file of certificates as httpx asks for it: the same for all
    clients.
    """
    if purpose is ssl.Purpose.SERVER_AUTH and list(given) == ["cafile"]:
        import certifi

        if given["cafile"] == certifi.where():
            return _context_of(given["cafile"])
    return _default_context(purpose, **given)


def _early_rewrite_bailout(self: AssertionRewritingHook, name: str, state: Any) -> bool:
    return name.partition(".")[0] in _FOREIGN or _bails_out(self, name, state)


def install() -> None:
    """Have libraries use this, if it is called before they are imported."""
    ssl.create_default_context = create_default_context
    AssertionRewritingHook._early_rewrite_bailout = _early_rewrite_bailout  # type: ignore[method-assign]
