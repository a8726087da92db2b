"""Totals are what the receipts add up to."""

from dataclasses import replace

from midstream.results.receipt import Captured, CaptureResult, Edited, Probed, Receipt
from midstream.runtime.frontend.stats import RequestTotals

RECEIPT = Receipt(
    request_id="r",
    prompt_tokens=5,
    generated_tokens=4,
    captured=(Captured("resid_post", 1, 8, 8), Captured("resid_post", 2, 8, 6)),
    edited=Edited(expected=8, applied=5, tokens=8, cached=3),
    probed=(Probed("p", "resid_post", 1, 8, 8),),
    dropped=2,
    kept=(("store", CaptureResult()), ("log", CaptureResult("error", "full"))),
)
SIZES = {("resid_post", 1): 100, ("resid_post", 2): 50}


def test_each_completion_counts_under_its_status_with_its_rows_edits_and_scores():
    tally = RequestTotals()
    tally.add([RECEIPT, replace(RECEIPT, problems=("no",), edited=None, kept=())], SIZES)
    assert tally.to_dict() == {
        "completions": {"partial": 1, "error": 1},
        "aborted": 0,
        "rows": 28,
        "row_bytes": 2 * (8 * 100 + 6 * 50),
        "dropped": 4,
        "edits": 5,
        "cached_edits": 3,
        "scores": 16,
        "sink_failures": 1,
    }
    tally.add([RECEIPT], SIZES)
    assert (tally.rows, tally.completions) == (42, {"partial": 2, "error": 1})
