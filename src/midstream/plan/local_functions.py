"""Python functions that edits call, by keys that plans can name."""

from __future__ import annotations

import importlib
import sys
import threading
import uuid
from collections.abc import Callable
from operator import attrgetter
from typing import Any
from weakref import WeakValueDictionary

from midstream.errors import SpecError


class LocalFunction:
    """One function; as long as this exists, its key leads to the function here, and tells edits
    apart. `path` is `module:name` for other processes; empty: they cannot import it.
    """

    __slots__ = ("__weakref__", "fn", "key", "path")

    def __init__(self, fn: Callable[..., Any]) -> None:
        """Use `function_of`, which gives a function the same key again."""
        self.fn = fn
        self.key = uuid.uuid4().hex
        self.path = _path_of(fn)

    @property
    def name(self) -> str:
        """What receipts and messages call it."""
        return self.path or str(getattr(self.fn, "__qualname__", type(self.fn).__name__))

    def emit(self) -> str:
        """Return its name, for people: no plan is read from that."""
        return self.name


_LOCK = threading.Lock()
_BY_KEY: WeakValueDictionary[str, LocalFunction] = WeakValueDictionary()
# By id of the function, which is no other object's while the value keeps the function alive.
_BY_ID: WeakValueDictionary[int, LocalFunction] = WeakValueDictionary()


def function_of(fn: object) -> LocalFunction:
    if isinstance(fn, LocalFunction):
        return fn
    if not callable(fn):
        raise SpecError("", f"expected a function of (h, info), got `{type(fn).__name__}`")
    with _LOCK:
        function = _BY_ID.get(id(fn))
        if function is None:
            function = LocalFunction(fn)
            _BY_ID[id(fn)] = _BY_KEY[function.key] = function
        return function


def find_function(key: str, path: str) -> Callable[..., Any]:
    """Return a function that a plan names: that of this process, or one imported by its path."""
    function = _BY_KEY.get(key)
    if function is not None:
        return function.fn
    if not path:
        raise LookupError("the function is in another process, and cannot be imported")
    module, _, name = path.partition(":")
    value = attrgetter(name)(importlib.import_module(module))
    if not callable(value):
        raise LookupError(f"{path} is no function")
    return value  # type: ignore[no-any-return]


def _path_of(fn: Any) -> str:
    """Return the path by which another process gets the very same function; empty: none."""
    module, name = getattr(fn, "__module__", None), getattr(fn, "__qualname__", None)
    if not module or not name or module == "__main__":
        return ""
    value: Any = sys.modules.get(module)
    for part in name.split("."):
        value = getattr(value, part, None)
    return f"{module}:{name}" if value is fn else ""
