"""A job's fields, and the ids that are made of them."""

import dataclasses

import pytest
from lab.jobs.fakes import job

from midstream.errors import SpecError
from midstream.lab.jobs.records import Record
from midstream.lab.jobs.request_ids import Identity
from midstream.plan import Capture


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"model": ""}, "model: expected a name or path"),
        ({"max_tokens": 0}, "max_tokens: expected at least 1, got 0"),
        ({"limit": 0}, "limit: expected at least 1"),
        ({"tag": "a/b"}, "tag: expected 1 to 128 of"),
        ({"flush_seconds": -1.0}, "flush_seconds: expected 0 to"),
        ({"flush_seconds": "30"}, "flush_seconds: expected a number, got `str`"),
        ({"model": 5}, "model: expected `str`, got `int`"),
        ({"capture": {"layers": [0]}}, "capture: expected `Capture`, got `dict`"),
        ({"chat": "no"}, "chat: expected `bool`, got `str`"),
        ({"engine_args": None}, "engine_args: expected a dict, got `None`"),
        (
            {"engine_args": {"dtype": "float16"}},
            "engine_args.dtype: cannot be set for a dataset capture",
        ),
        ({"engine_args": {"additional_config": {}}}, "engine_args.additional_config"),
        ({"capture": Capture(0, sink="store")}, "capture: leave out sink"),
        ({"capture": Capture(0, "z", heads=1)}, "capture.heads: leave out: a store has whole"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_wrong_field_is_refused_by_name(tmp_path, fields, said):
    with pytest.raises(SpecError) as error:
        job(tmp_path, **fields)
    assert said in str(error.value)


def test_the_prompts_field_has_the_name_that_data_sets_give_it_and_paths_may_be_objects(tmp_path):
    assert job(tmp_path).column == "text"
    assert job(tmp_path, chat=True).column == "messages"
    assert job(tmp_path, chat=True, prompt_field="talk").column == "talk"
    names = ("data", "out", "errors")
    texts = {name: str(tmp_path / name) for name in names}
    paths = {name: tmp_path / name for name in names}
    assert job(tmp_path, **paths) == job(tmp_path, **texts)


def test_ids_are_the_same_in_every_run_sort_as_lines_do_and_differ_by_prompt_and_terms(tmp_path):
    """Written out: were this to change, no store could be resumed that is there already."""
    identity = Identity(job(tmp_path))
    assert identity.id(Record(17, "hello")) == "000000017-40a07d29d3cc0745"
    ids = [identity.id(Record(line, "x")) for line in (1, 2, 9, 10, 11, 100)]
    assert ids == sorted(ids)
    first = job(tmp_path)
    talk = [{"role": "user", "content": "x"}]
    ids = {Identity(first).id(Record(1, prompt)) for prompt in ("x", "x ", talk, str(talk))}
    ids.add(Identity(first).id(Record(2, "x")))
    for changes in ({"tag": "t"}, {"max_tokens": 2}, {"model": "m"}, {"capture": Capture(1)}):
        ids.add(Identity(dataclasses.replace(first, **changes)).id(Record(1, "x")))
    assert len(ids) == 9
