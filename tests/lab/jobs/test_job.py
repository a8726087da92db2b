"""A job's fields, and the ids that are made of them."""

from __future__ import annotations

import dataclasses

import pytest
from lab.jobs.fakes import job

from midstream import SpecError
from midstream.lab.jobs.records import Record
from midstream.lab.jobs.request_ids import Identity
from midstream.plan import Capture


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"model": ""}, "model: expected a name or path"),
        ({"data": ""}, "data: expected a name or path"),
        ({"max_tokens": 0}, "max_tokens: expected at least 1, got 0"),
        ({"max_tokens": True}, "max_tokens: expected `int`, got `bool`"),
        ({"limit": 0}, "limit: expected at least 1"),
        ({"tag": "a/b"}, "tag: expected 1 to 128 of"),
        ({"flush_seconds": -1.0}, "flush_seconds: expected 0 to"),
        ({"flush_seconds": float("nan")}, "flush_seconds: expected 0 to"),
        ({"flush_seconds": "30"}, "flush_seconds: expected a number, got `str`"),
        ({"flush_seconds": None}, "flush_seconds: expected a number, got `None`"),
        ({"model": 5}, "model: expected `str`, got `int`"),
        ({"capture": {"layers": [0]}}, "capture: expected `Capture`, got `dict`"),
        ({"capture": None}, "capture: expected `Capture`, got `None`"),
        ({"chat": "no"}, "chat: expected `bool`, got `str`"),
        ({"resume": 1}, "resume: expected `bool`, got `int`"),
        ({"keep_prompts": None}, "keep_prompts: expected `bool`, got `None`"),
        ({"prompt_field": 5}, "prompt_field: expected `str`, got `int`"),
        ({"engine_args": None}, "engine_args: expected a dict, got `None`"),
        ({"engine_args": ["a"]}, "engine_args: expected a dict, got `list`"),
        (
            {"engine_args": {"dtype": "float16"}},
            "engine_args.dtype: cannot be set for a dataset capture",
        ),
        ({"engine_args": {"additional_config": {}}}, "engine_args.additional_config"),
        ({"capture": Capture(0, sink="store")}, "capture: leave out sink"),
        ({"capture": Capture(0, metadata={"a": 1})}, "capture: leave out sink"),
        ({"capture": Capture(0, "z", heads=1)}, "capture.heads: leave out: a store has whole"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_wrong_field_is_refused_by_name(tmp_path, fields, said):
    with pytest.raises(SpecError) as error:
        job(tmp_path, **fields)
    assert said in str(error.value)


def test_the_prompts_field_has_the_name_that_data_sets_give_it(tmp_path):
    assert job(tmp_path).column == "text"
    assert job(tmp_path, chat=True).column == "messages"
    assert job(tmp_path, chat=True, prompt_field="talk").column == "talk"


def test_an_id_is_the_same_in_every_run_and_sorts_as_lines_do(tmp_path):
    """Written out: were this to change, no store could be resumed that is there already."""
    identity = Identity(job(tmp_path))
    assert identity.id(Record(17, "hello")) == "000000017-40a07d29d3cc0745"
    ids = [identity.id(Record(line, "x")) for line in (1, 2, 9, 10, 11, 100)]
    assert ids == sorted(ids)


def test_prompts_and_terms_that_differ_have_ids_that_differ(tmp_path):
    first = job(tmp_path)
    talk = [{"role": "user", "content": "x"}]
    ids = {Identity(first).id(Record(1, prompt)) for prompt in ("x", "x ", talk, str(talk))}
    ids.add(Identity(first).id(Record(2, "x")))
    for changes in ({"tag": "t"}, {"max_tokens": 2}, {"model": "m"}, {"capture": Capture(1)}):
        ids.add(Identity(dataclasses.replace(first, **changes)).id(Record(1, "x")))
    assert len(ids) == 9


def test_paths_may_be_path_objects(tmp_path):
    names = ("data", "out", "errors")
    texts = {name: str(tmp_path / name) for name in names}
    paths = {name: tmp_path / name for name in names}
    assert job(tmp_path, **paths) == job(tmp_path, **texts)
