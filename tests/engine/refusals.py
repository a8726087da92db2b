"""What requests are refused, by field and message."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from midstream.errors import SpecError


def assert_refused(ask: Callable[[Any], Any], cases: Iterable[tuple[Any, str, str]]) -> None:
    """Each (what is asked for, the path of the error, a pattern of its message)."""
    for asked, path, words in cases:
        with pytest.raises(SpecError, match=words) as caught:
            ask(asked)
        assert caught.value.path == path, f"{asked!r}: {caught.value}"
