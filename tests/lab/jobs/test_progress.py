"""How fast a job is, when it will have ended, and how that is shown."""

import io
import re

from rich.console import Console

from midstream.lab.jobs import Counts, Summary
from midstream.lab.jobs import progress as display
from midstream.lab.jobs.progress import Display, conclude, describe
from midstream.lab.jobs.records import Failed


def counts(**fields):
    return Counts(**fields)


def test_a_line_has_how_far_how_fast_and_how_long_and_the_end_a_sum():
    now = counts(total=2000, captured=999, failed=1, rows=4000, nbytes=8_000_000, seconds=10.0)
    assert describe(now) == "lines, 1 failed, 400 rows/s, 0.8 MB/s"
    assert describe(counts(captured=3)) == "lines, 0 rows/s, 0.0 MB/s"
    now = counts(total=10, skipped=3, captured=5, stored=5, failed=1, rows=10, nbytes=2_000_000,
                 seconds=61.0)  # fmt: skip
    said = conclude(Summary("acts", now, "acts/errors.jsonl", interrupted=True))
    assert said.splitlines() == [
        "acts: 8 of 10 lines are stored; 10 rows, 2.0 MB in 0:01:01, 0 rows/s",
        "3 of them were stored before this run",
        "1 failed: see acts/errors.jsonl",
        "not all of the data was captured; continue with --resume",
    ]


def test_on_a_terminal_there_is_a_bar_and_failures_stand_above_it():
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=120)
    with Display(console, "acts/errors.jsonl") as watch:
        for captured in range(1, 50):
            watch.moved(counts(total=50, captured=captured, seconds=captured / 10))
        watch.failed(Failed(7, "no\nprompt\x1b[2J"))
    said = shown.getvalue()
    assert "49/50" in said
    assert "━" in said
    assert "line 7: no prompt" in said
    assert "\x1b[2J" not in said, "a line of data does nothing to the terminal"


def test_elsewhere_lines_have_the_time_left_to_which_earlier_runs_add_nothing(monkeypatch):
    now = iter(range(0, 1000, 6))
    monkeypatch.setattr(display.time, "monotonic", lambda: float(next(now)))
    shown = io.StringIO()
    watch = Display(Console(file=shown, force_terminal=False, width=200), None)
    watch._progress.get_time = watch._progress._tasks[0]._get_time = iter(range(999)).__next__
    for captured in range(1, 9):
        watch.moved(counts(total=1000, skipped=900, captured=captured, seconds=float(captured)))
    lines = shown.getvalue().splitlines()
    assert len(lines) > 1
    assert all(line.startswith("90") and "/1,000 lines, " in line for line in lines)
    assert re.search(r"ETA 0:0[1-9]:\d\d$", lines[-1]), lines
