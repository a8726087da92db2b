"""The log has one line for each event, whatever a client wrote."""

import json
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.server import audit_log as events

JSON = st.none() | st.integers() | st.booleans() | st.text() | st.lists(st.text(), max_size=3)


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


def logged(event: str, **fields: object) -> logging.LogRecord:
    logger, kept = logging.getLogger("midstream.serving"), Kept()
    level = logger.level
    logger.addHandler(kept)
    logger.setLevel(logging.INFO)
    try:
        events.log_event(event, **fields)
    finally:
        logger.removeHandler(kept)
        logger.setLevel(level)
    [record] = kept.records
    return record


def test_a_line_has_the_event_and_its_fields():
    record = logged("steering.changed", epoch=3, digest="9c", param=None)
    assert record.getMessage() == 'midstream steering.changed epoch=3 digest="9c"'
    assert record.midstream == {"event": "steering.changed", "epoch": 3, "digest": "9c"}


@given(st.dictionaries(st.sampled_from("abcd"), JSON))
def test_no_value_breaks_a_line_or_stands_for_another_field(fields):
    line = logged("x", **fields).getMessage()
    assert len(line.splitlines()) == 1
    assert line.isprintable()
    found, rest = {}, line.removeprefix("midstream x ")
    while rest:
        name, _, rest = rest.partition("=")
        found[name.strip()], end = json.JSONDecoder().raw_decode(rest)
        rest = rest[end:]
    assert found == {name: value for name, value in fields.items() if value is not None}


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> logging.Logger:
    logger = logging.getLogger("midstream")
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "level", logging.NOTSET)
    monkeypatch.setattr(logger, "propagate", False)
    return logger


def test_lines_go_where_vllms_go_unless_somebody_has_said_where(ours, monkeypatch):
    theirs, handler = logging.getLogger("vllm"), Kept()
    # Here and not in the fixture: pytest puts handlers of its own on loggers that tell nobody else.
    ours.handlers = []
    monkeypatch.setattr(theirs, "handlers", [handler])
    events.attach_handlers()
    assert ours.handlers == [handler]
    own = Kept()
    ours.handlers = [own]
    events.attach_handlers()
    assert ours.handlers == [own]
