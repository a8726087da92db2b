"""Over HTTP, a field that asks for something is honoured or rejected."""

import asyncio
import json
import re

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.misspelling import ASKED, misspelt
from support.nightly import NIGHTLY
from support.others_words import ROWS, TRANSLATED
from support.serving_fake import serving

from midstream.compat import vllm_lens
from midstream.compat.foreign_fields import FOREIGN, OWN

PLACES = ("", "extra_body", "extra_args", "sampling_params", "vllm_xargs")
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
ASK = {"prompt": "abc", "messages": [{"role": "user", "content": "hi"}], "input": "abc"}


def body_with(place, name, value):
    return {**ASK, place: {name: value}} if place else {**ASK, name: value}


async def post(path, *bodies):
    """Post bodies, each spelt in several ways; return (answers, bodies that vLLM was given)."""
    async with serving() as (site, client):
        answers = [
            await client.post(path, content=each, headers={"content-type": "application/json"})
            for body in bodies
            for each in spellings(body)
        ]
        return answers, site.seen


def spellings(body):
    text = json.dumps(body, indent=1)
    yield text.encode()
    yield text.replace('": ', '" \n\t: ').encode()
    yield text.encode("utf-16")
    # Escape the first letter of each key.
    yield re.sub(r'"(\w)(\w+":)', lambda m: f'"\\u00{ord(m[1]):02x}{m[2]}', text).encode()


def check_rejected(answers, seen, path):
    assert seen == []
    for answer in answers:
        error = answer.json()["error"]
        assert answer.status_code == 400
        assert error["param"].startswith(path)


def check_honoured(answers, seen, name):
    assert all(name not in body and name not in body.get("vllm_xargs", {}) for body in seen)
    for answer in answers:
        assert answer.status_code == 200
        assert name in answer.json()["midstream"]["receipt"]["coming_from"]


# By day each field at one of the endpoints.
KNOWN = [
    (name, path)
    for nth, name in enumerate([*FOREIGN, *OWN])
    for path in (PATHS if NIGHTLY else [PATHS[nth % 3]])
]


@pytest.mark.parametrize(("name", "path"), KNOWN)
def test_a_known_field_is_never_passed_over(name, path):
    bodies = [body_with(place, name, ASKED.get(name, 1)) for place in PLACES]
    answers, seen = asyncio.run(post(path, *bodies))
    several = len(answers) // len(PLACES)
    assert several > 1
    for nth, place in enumerate(PLACES):
        mine = answers[nth * several : (nth + 1) * several]
        check_rejected(mine, seen, f"{place}.{name}" if place else name)


@pytest.mark.parametrize("path", PATHS[:2])
@pytest.mark.parametrize("name", TRANSLATED)
def test_a_field_with_an_equal_here_is_named_by_the_receipt(name, path):
    places = ("", "vllm_xargs") if name in vllm_lens.FIELDS else ("",)
    for place in places:
        body = body_with(place, name, TRANSLATED[name])
        body |= {"patch_vectors": ROWS} if name == "patch" else {}
        check_honoured(*asyncio.run(post(path, body)), name)


@settings(max_examples=60, deadline=None)
@given(
    pair=st.sampled_from(["midstream", *OWN]).flatmap(
        lambda own: st.tuples(st.just(own), misspelt(own))
    ),
    place=st.sampled_from(PLACES),
    path=st.sampled_from(PATHS),
)
def test_a_misspelt_field_is_never_passed_over(pair, place, path):
    own, name = pair
    assume(len(name) >= 3 and name not in ("midstream", *OWN, *FOREIGN))
    body = body_with(place, name, ASKED.get(own, ASKED))
    check_rejected(*asyncio.run(post(path, body)), f"{place}.{name}" if place else name)


def test_a_plan_beside_a_field_of_another_tool_does_not_hide_it():
    body = {**ASK, "midstream": {"capture": ASKED["capture"]}, "apply_hooks": "[]"}
    answers, seen = asyncio.run(post(PATHS[0], body))
    check_rejected(answers[:1], seen, "apply_hooks")


def test_fields_of_plugins_and_other_endpoints_pass():
    fields = {"mainstream": 1, "step": {"id": 3}, "metadata": {"edits": 1}, "capture": None}
    answers, seen = asyncio.run(post("/v1/completions", {**ASK, **fields}))
    assert {answer.status_code for answer in answers} == {200}
    assert all(body == {**ASK, **fields} for body in seen)
    answers, seen = asyncio.run(post("/v1/embeddings", {"input": "a", "capture": {"layers": 1}}))
    assert {answer.status_code for answer in answers} == {200}
