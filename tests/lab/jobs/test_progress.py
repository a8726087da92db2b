"""How fast a job is, when it will have ended, and how that is shown."""

import io

import pytest
from rich.console import Console

from midstream.lab.jobs import Counts, Summary
from midstream.lab.jobs import progress as display
from midstream.lab.jobs.progress import Display, conclude, describe
from midstream.lab.jobs.rates import Meter, clock
from midstream.lab.jobs.records import Failed


def counts(**fields):
    return Counts(**fields)


def test_rates_are_those_of_the_last_while_and_the_time_left_that_of_the_lines_left():
    meter = Meter()
    # A slow minute, and then a fast one.
    for second in range(61):
        meter.note(counts(seconds=second, captured=second, rows=2 * second, nbytes=200 * second))
    assert (meter.rows, meter.nbytes) == (2.0, 200.0)
    for second in range(61, 121):
        rows = 120 + 20 * (second - 60)
        meter.note(counts(seconds=second, captured=rows // 2, rows=rows, nbytes=100 * rows))
    assert (meter.rows, meter.nbytes) == (20.0, 2000.0)
    meter = Meter()
    now = counts(total=1000, skipped=400, captured=90, failed=10, seconds=10.0)
    meter.note(now)
    assert meter.left(now) == 50.0
    assert meter.left(counts(captured=5, seconds=10.0)) is None, "nobody knows how many there are"


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0, "0:00"), (59.6, "1:00"), (3599, "59:59"), (3723, "1:02:03")]
)
def test_times_are_shown_as_clocks_show_them(seconds, shown):
    assert clock(seconds) == shown


def test_a_line_has_how_far_how_fast_and_how_long_and_the_end_a_sum():
    meter = Meter()
    now = counts(total=2000, captured=999, failed=1, rows=4000, nbytes=8_000_000, seconds=10.0)
    meter.note(now)
    assert describe(now, meter) == ("1,000/2,000 lines, 1 failed, 400 rows/s, 0.8 MB/s, ETA 0:10")
    assert describe(counts(captured=3), Meter()) == "3 lines, 0 rows/s, 0.0 MB/s"
    now = counts(total=10, skipped=3, captured=5, stored=5, failed=1, rows=10, nbytes=2_000_000,
                 seconds=61.0)  # fmt: skip
    said = conclude(Summary("acts", now, "acts/errors.jsonl", interrupted=True))
    assert said.splitlines() == [
        "acts: 8 of 10 lines are stored; 10 rows, 2.0 MB in 1:01, 0 rows/s",
        "3 of them were stored before this run",
        "1 failed: see acts/errors.jsonl",
        "not all of the data was captured; continue with --resume",
    ]


def test_on_a_terminal_there_is_a_bar_and_failures_stand_above_it(monkeypatch):
    monkeypatch.setattr(display, "_BETWEEN_FRAMES", 0.0)
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=120)
    with Display(console, "acts/errors.jsonl") as watch:
        for captured in range(1, 50):
            watch.moved(counts(total=50, captured=captured, seconds=captured / 10))
        watch.failed(Failed(7, "no\nprompt\x1b[2J"))
    said = shown.getvalue()
    assert "49/50 lines" in said
    assert "━" in said
    assert "line 7: no prompt" in said
    assert "\x1b[2J" not in said, "a line of data does nothing to the terminal"
