"""The strict readers that plans and settings share."""

import functools
import re
import time
from typing import Annotated, Literal

import numpy as np
import pytest
from msgspec import Meta, Struct
from support.refusals import refused

from midstream.errors import ConfigError
from midstream.validation import closest, hint, read_count, read_mapping, read_struct, setting


class Knobs(Struct, frozen=True, rename={"from_": "from"}):
    """Fields of every kind that settings have."""

    count: Annotated[int, Meta(ge=1)] = 4
    most: Annotated[int, Meta(ge=1)] | None = None
    mode: Literal["on", "off"] = "on"
    from_: bool = False
    names: tuple[str, ...] = ()


def test_a_dict_is_read_as_a_struct():
    assert read_struct(Knobs, {}) == Knobs()
    given = {"count": 1, "most": 2**70, "mode": "off", "from": True, "names": ["a"]}
    assert read_struct(Knobs, given) == Knobs(1, 2**70, "off", True, ("a",))
    assert given["names"] == ["a"]


def test_a_field_that_is_wrong_is_named_with_its_value_and_what_would_be_right():
    cases = (
        ({"cuont": 1}, "unknown field 'cuont' (did you mean `count`?); known: `count`, `most`, "),
        ({"from_": True}, "unknown field 'from_' (did you mean `from`?); known: "),
        ({1: 2}, "field names must be `str`, got `int`"),
        ([], "expected a dict of `count`, `most`, `mode`, `from`, `names`, got `list`"),
        ({"count": 0}, "count: expected `int` >= 1, got 0"),
        ({"count": True}, "count: expected `int`, got True"),
        ({"count": 1.0}, "count: expected `int`, got 1.0"),
        ({"most": 0}, "most: expected `int` >= 1, got 0"),
        ({"most": "x" * 99}, f"most: expected `int | null`, got '{'x' * 59}…"),
        ({"mode": "of"}, "mode: expected one of `on`, `off`, got 'of' (did you mean `off`?)"),
        ({"mode": False}, "mode: expected one of `on`, `off`, got `bool`"),
        ({"from": 1}, "from: expected `bool`, got 1"),
        ({"names": "ab"}, "names: expected `array`, got 'ab'"),
        ({"names": ["a", 3]}, "names[1]: expected `str`, got `int`"),
    )
    read = functools.partial(read_struct, Knobs)
    refused(read, *((given, f"^{re.escape(message)}") for given, message in cases))


def test_what_is_no_count_is_rejected():
    refused(
        lambda value: read_count(value, 2),
        (True, "expected `int`, got `bool`$"),
        (1.0, "expected `int`, got `float`$"),
        ("1", "expected `int`, got `str`$"),
        (None, "expected `int`, got `None`$"),
        (1, "expected at least 2, got 1$"),
        (-(2**70), "expected at least 2, got an integer of 71 bits$"),
    )
    for value in (1, 2**70, np.int64(3)):
        assert read_count(value) == value
        assert type(read_count(value)) is int


def test_an_error_of_a_setting_has_the_settings_path():
    @setting("midstream.http")
    def read(value: object) -> None:
        with setting("midstream.inner"):
            read_mapping({}, "a dict")
        read_struct(Knobs, value)

    with pytest.raises(ConfigError, match=r"^midstream\.http\.count: expected `int` >= 1, got 0$"):
        read({"count": 0})
    with pytest.raises(ConfigError, match=r"^midstream\.http: unknown field 'x'; known: "):
        read({"x": 0})
    raises = pytest.raises(ConfigError, match="^inner: expected a dict, got 3$")
    with setting("outer"), raises, setting("inner"):
        read_mapping(3, "a dict")


def test_the_closest_name_is_looked_for_only_where_that_is_fast():
    assert closest("bank_row", ["bank_rows", "probes"]) == "bank_rows"
    assert closest("zzz", ["bank_rows", "probes"]) == ""
    assert hint("zzz", ["bank_rows"]) == ""
    names = [f"{'direction-' * 6}{index:06}" for index in range(100_000)]
    began = time.process_time()
    assert hint(f"{'direction-' * 6}x00000", names) == ""
    assert time.process_time() - began < 1
    assert hint("direction-x", ["direction-y"]) == " (did you mean `direction-y`?)"
