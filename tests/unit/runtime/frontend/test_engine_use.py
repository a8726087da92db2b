"""One thread at a time uses an engine that its caller steps."""

import threading

import pytest

from midstream.errors import BusyError
from midstream.runtime.frontend.engine_use import EngineUse

FOREVER = 30.0


class Engine:
    """An engine that has requests or has none."""

    def __init__(self):
        self.unfinished = 0
        self.use = EngineUse(lambda: bool(self.unfinished))


def in_thread(work, name="another"):
    """What a function returns, or raises, in a thread of its own, which has ended then."""
    found = []

    def run():
        try:
            found.append(work())
        except Exception as error:  # noqa: BLE001 - the test looks at it
            found.append(error)

    thread = threading.Thread(target=run, name=name)
    thread.start()
    thread.join(FOREVER)
    assert found, "it never ended"
    return found[0]


def enter(context):
    with context():
        return "entered"


def test_while_one_thread_is_in_a_call_another_gets_an_error_that_names_it_and_the_remedy():
    engine = Engine()
    use = engine.use
    with use.call(), use.call():
        for context in (use.call, use.whole_call):
            error = in_thread(lambda context=context: enter(context))
            assert isinstance(error, BusyError)
            assert "in use by the thread 'MainThread'" in str(error)
            assert "AsyncLLM" in str(error)
        assert isinstance(in_thread(use.claim), BusyError)
    assert in_thread(lambda: enter(use.whole_call)) == "entered"


def test_requests_that_a_thread_queued_keep_others_away_until_they_have_ended():
    engine = Engine()
    engine.use.claim()
    engine.unfinished = 3
    assert isinstance(in_thread(lambda: enter(engine.use.call)), BusyError)
    with engine.use.call():  # the thread that queued them
        engine.unfinished = 0
    assert in_thread(lambda: enter(engine.use.call)) == "entered"


def test_requests_of_a_thread_that_has_ended_are_anybodys():
    engine = Engine()
    in_thread(engine.use.claim)
    engine.unfinished = 1
    with engine.use.call():
        pass


def test_a_call_that_would_return_outputs_of_requests_queued_before_is_refused():
    engine = Engine()
    engine.use.claim()
    engine.unfinished = 1
    with pytest.raises(BusyError, match=r"wait_for_completion\(\) first"), engine.use.whole_call():
        raise AssertionError("it was let in")
    engine.unfinished = 0
    with engine.use.whole_call():
        engine.unfinished = 1  # its own
        with engine.use.whole_call():
            pass


def test_after_an_error_within_a_call_the_engine_is_free():
    engine = Engine()
    with pytest.raises(ZeroDivisionError), engine.use.call():
        raise ZeroDivisionError
    assert in_thread(lambda: enter(engine.use.whole_call)) == "entered"
