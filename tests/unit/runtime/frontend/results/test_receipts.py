import warnings
from types import SimpleNamespace

import pytest

from midstream.config.config import Config
from midstream.errors import ReceiptError, ReceiptWarning
from midstream.results.receipt import Receipt
from midstream.runtime.frontend.results.receipts import ReceiptReporter


def _output(name, *problems):
    receipt = Receipt(name, 4, 2, (), None, problems=problems)
    return SimpleNamespace(request_id=name, outputs=[SimpleNamespace(receipt=receipt)])


def _noted(on_mismatch, *outputs):
    found = ReceiptReporter(Config.parse({"on_mismatch": on_mismatch}))
    for output in outputs:
        found.add(output)
    return found


def test_nothing_is_said_where_all_was_done():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for how in ("raise", "warn"):
            _noted(how, _output("1"), _output("2")).report()


def test_every_problem_is_raised_at_once_with_all_outputs():
    outputs = [_output("1"), _output("2", "one row came, expected two", "late"), _output("3", "x")]
    noted = _noted("raise", *outputs)
    with pytest.raises(ReceiptError, match=r"request 2: one row .*; late\nrequest 3: x") as caught:
        noted.report(outputs)
    assert caught.value.outputs == outputs
    noted.report(outputs)  # Once is enough.


def test_with_warn_each_request_is_warned_of_and_nothing_raised():
    noted = _noted("warn", _output("1", "x"), _output("2", "y"))
    with pytest.warns(ReceiptWarning) as caught:
        noted.report()
    assert [str(one.message) for one in caught] == ["request 1: x", "request 2: y"]


def test_what_nobody_waits_for_is_not_told():
    noted = _noted("raise", _output("1", "x"), _output("2", "y"))
    noted.forget({"1"})
    with pytest.raises(ReceiptError) as caught:
        noted.report()
    assert str(caught.value) == "request 2: y"
