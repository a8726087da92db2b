"""Functions have keys of their own, and are found by them or by import."""

import gc
import json

import pytest

from midstream.errors import SpecError
from midstream.plan import Local
from midstream.plan.local_functions import find_function, function_of


class Thing:
    def method(self, h, info):
        return h


def test_a_function_has_one_key_and_others_have_others():
    def first(h, info):
        return h

    def second(h, info):
        return h

    one = function_of(first)
    assert function_of(first) is one is function_of(one)
    assert one.key != function_of(second).key
    assert find_function(one.key, "") is first
    assert Local(first, 1) == Local(first, 1) != Local(second, 1)
    assert hash(Local(first, 1)) == hash(Local(first, 1))


def test_a_key_is_never_that_of_a_function_that_is_gone():
    keys = set()
    for _ in range(50):
        keys.add(function_of(lambda h, info: h).key)
    gc.collect(1)  # the functions are young
    assert len(keys) == 50
    with pytest.raises(LookupError, match="another process"):
        find_function(keys.pop(), "")


def test_only_what_an_import_leads_to_has_a_path():
    assert function_of(json.dumps).path == "json:dumps"
    assert function_of(Thing.method).path == f"{__name__}:Thing.method"
    for fn in (lambda h, info: h, Thing().method):
        assert function_of(fn).path == ""
    assert find_function("unknown", "json:dumps") is json.dumps
    with pytest.raises(LookupError, match="no function"):
        find_function("unknown", "json:__name__")
    with pytest.raises(ImportError):
        find_function("unknown", "no_such_module:fn")
    with pytest.raises(SpecError, match="expected a function"):
        function_of("json:dumps")
