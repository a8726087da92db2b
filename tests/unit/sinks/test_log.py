import logging

import pytest
import torch
from support.sinking import activations, delivery

from midstream.results.activations import Activations
from midstream.results.readouts.attention import AttentionResults, AttentionRows
from midstream.sinks.log import NAME, LogSink


def test_a_completion_is_one_line_with_its_taps_rows_and_norms(caplog):
    ones = Activations(
        {("resid_post", 1): torch.ones(2, 4), ("resid_post", 3): torch.zeros(0, 4)},
        dict.fromkeys([("resid_post", 1), ("resid_post", 3)], torch.arange(2)),
        torch.arange(4),
    )
    with caplog.at_level(logging.INFO, NAME):
        assert LogSink().write(delivery(activations=ones, tag="v1", completions=2)) is None
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert record.getMessage() == (
        "request 7, completion 0, tag v1, ok, 3 prompt and 2 generated tokens; "
        "resid_post 1: 2 rows, mean norm 2; resid_post 3: 0 rows"
    )


def test_attention_is_counted(caplog):
    rows = AttentionRows("entropy", torch.ones(2, 4), None, torch.arange(2), (0, 1, 2, 3))
    found = AttentionResults({("", 1): rows, ("mine", 2): rows})
    with caplog.at_level(logging.INFO, NAME):
        made = delivery(activations=Activations({}, {}, []), readouts={"attention": found})
        LogSink().write(made)
    (record,) = caplog.records
    assert record.getMessage().endswith("; attention 1: 2 rows; attention.mine 2: 2 rows")


def test_its_level_is_a_setting(caplog):
    with caplog.at_level(logging.INFO, NAME):
        LogSink("debug").write(delivery(activations=activations()))
        assert not caplog.records
        LogSink("warning").write(delivery())
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    for level in ("loud", "", 10, None):
        with pytest.raises(ValueError, match="level: expected one of debug, info"):
            LogSink(level)
