"""Both clients ask a server about rows that it keeps, or about rows that they send."""

import pytest
import torch
from support.serving_fake import outputs_of

from midstream import Capture
from midstream.client import ServerError
from midstream.errors import ReceiptError, SpecError
from midstream.plan import CapturedRows, Replace, Steer, Text, Vector
from midstream.results.receipt import Selected

QUESTION = "What is it thinking of?"
KEPT = 5  # rows of the prompt "abc" and what is generated


def value(layer, *positions):
    return tuple(Vector.parse([10.0 * position + layer] * 3) for position in positions)


@pytest.fixture
def keep(both, site):
    """Keeps rows of layers 1 and 2 on the server; then answers as an engine in which a placeholder
    is `keep.tokens` tokens.
    """

    def kept():
        output = both.call("complete", "abc", capture=Capture([1, 2]), activations="keep")
        site.engine.calls.clear()
        return output

    def script(prompt, params, request_id):
        found = outputs_of(prompt, params, request_id)
        plan = params.extra_args["midstream"].plan
        for completion in found[-1].outputs:
            if plan.edits:
                (text,) = plan.edits[0].positions.include
                tokens = kept.tokens * len(text.text) // 2
                edited = Selected("edits[0]", ((4, 4 + tokens),))
                object.__setattr__(completion.receipt, "selected", (edited,))
        return found

    kept.tokens = 1
    site.engine.script = script
    return kept


def asked(site):
    """(message, edit) of each question that reached the engine, by message."""
    edits = [params.extra_args["midstream"].plan.edits for _, params, _ in site.engine.calls]
    contents = [body["messages"][0]["content"] for body in site.seen if "messages" in body]
    assert [len(mine) for mine in edits] == [1] * len(contents)
    return sorted(zip(contents, [mine for (mine,) in edits], strict=True), key=lambda one: one[0])


def test_rows_that_the_server_keeps_are_placed_by_their_handle(both, site, keep):
    output = keep()
    (answer,) = both.call("ask", output, QUESTION, 2)
    assert answer.text == "t1t2t3"[-len(answer.text) :]
    assert answer.receipt.status == "ok"
    ((content, edit),) = asked(site)
    assert content == f"Layer: 2\n{' ?' * KEPT} \n{QUESTION}"
    assert edit == Steer(
        rows=value(2, *range(KEPT)), layer=1, positions=Text(" ?" * KEPT), norm="match"
    )
    body = site.seen[-1]
    assert (body["max_tokens"], body["temperature"]) == (64, 0)


def test_listed_positions_and_all_other_arguments_reach_the_server(both, site, keep):
    captured = keep().outputs[0].captured
    how = {"into": 0, "mode": "replace", "norm": None, "placeholder": " #", "template":
           "{rows}: {question} {layer}"}  # fmt: skip
    both.call("ask", captured, "{rows}?", 1, positions=[3, 0], max_tokens=7, model="oracle", **how)
    ((content, edit),) = asked(site)
    assert content == " # #: {rows}? 1"
    assert edit == Replace(value(1, 3, 0), layer=0, positions=Text(" # #"))
    body = site.seen[-1]
    assert (body["max_tokens"], body["temperature"], body["model"]) == (7, 0, "oracle")
    both.call("ask", captured.at(2), QUESTION, 1, max_completion_tokens=3, temperature=1)
    assert "max_tokens" not in site.seen[-1]
    assert site.seen[-1]["temperature"] == 1


def test_questions_and_sources_are_lists_in_order(both, site, keep):
    first, second = keep(), keep()
    answers = both.call("ask", [first, second], ["a", "b"], 1, positions=1)
    assert len(answers) == 2
    assert [edit.vector for _, edit in asked(site)] == [*value(1, 1)] * 2
    site.seen.clear()
    site.engine.calls.clear()
    sent = torch.full((2, 3), 7.0)
    assert len(both.call("ask", sent, [f"q{n}" for n in range(20)], 1)) == 20
    assert [edit.rows for _, edit in asked(site)] == [(Vector.parse([7.0] * 3),) * 2] * 20


def test_what_is_not_there_or_was_not_captured_is_refused_by_name(both, site, keep):
    output = keep()
    captured = output.outputs[0].captured
    for arguments, path, problem in (
        ((captured, QUESTION, 3), "layer", "no rows of resid_post at layer 3 were captured; there"),
        ((CapturedRows("gone"), QUESTION, 1), "sources", "there are no rows 'gone' of this client"),
        ((captured, "is ? it", 1), "placeholder", "twice"),
        ((captured, "", 1), "question", "expected a text"),
        (("x", QUESTION, 1), "sources", "got `str`"),
        ((captured.at(0), "is ? it", 1), "sources.positions", "in one place"),
        ((CapturedRows("x", 0, 2), QUESTION, 1), "sources.layer", "2, and the argument is 1"),
    ):
        positions = {"positions": 1} if "?" in arguments[1][:5] else {}
        with pytest.raises(SpecError, match=problem) as caught:
            both.call("ask", *arguments, **positions)
        assert caught.value.path == path
    for more, problem in (({"edits": []}, "makes its own"), ({"into": -1}, "from 0 on")):
        with pytest.raises(SpecError, match=problem):
            both.call("ask", captured, QUESTION, 1, **more)
    assert site.engine.calls == []
    both.call("delete", captured)
    with pytest.raises(ServerError, match="there are no rows") as error:
        both.call("ask", captured, QUESTION, 1, positions=1)
    assert error.value.param == "midstream.edits[0].rows.captured"
    with pytest.raises(ServerError, match="no row of resid_post.1 was captured at position 9"):
        both.call("ask", keep(), QUESTION, 1, positions=9)


def test_a_row_that_had_two_tokens_is_an_error(both, keep):
    keep.tokens = 2
    with pytest.raises(ReceiptError, match="1 rows were placed at 2 tokens"):
        both.call("ask", keep(), QUESTION, 1, positions=1)
