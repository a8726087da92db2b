"""How many engines there are on a cluster, what is refused, and what travels."""

import re
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lab.jobs.fakes import job

from midstream import errors
from midstream.errors import EngineError, SpecError, StoreError, UnsupportedError
from midstream.lab.jobs.local_executor import CapturedLine
from midstream.lab.jobs.ray.chunks import Outcome, pack_error, unpack_error
from midstream.lab.jobs.ray.placement import EngineLayout, Placement
from midstream.lab.jobs.records import Failed

ONE_CPU = [{"CPU": 2.0}]
GPUS = [{"CPU": 64.0, "GPU": 8.0}, {"CPU": 64.0, "GPU": 8.0}, {"CPU": 16.0}]


def settle(spread, machines, **engine_args):
    found = spread.resolve(job(Path("."), engine_args=engine_args), machines)
    return found.engines, found.cpus, found.gpus


@pytest.mark.parametrize(
    ("spread", "machines", "engine_args", "found"),
    [
        (Placement(), ONE_CPU, {}, (2, 1, 0)),
        (Placement(cpus=2), ONE_CPU, {}, (1, 2, 0)),
        (Placement(engines=1), ONE_CPU, {}, (1, 1, 0)),
        (Placement(), GPUS, {}, (16, 1, 1)),
        (Placement(), GPUS, {"tensor_parallel_size": 8}, (2, 1, 8)),
        (Placement(), GPUS, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, (4, 1, 4)),
        # Of three GPUs each, two engines fit a machine of eight, and two GPUs stay idle.
        (Placement(), GPUS, {"tensor_parallel_size": 3}, (4, 1, 3)),
        (Placement(cpus=32), GPUS, {}, (4, 32, 1)),
        (Placement(gpus=0), GPUS, {}, (144, 1, 0)),
        (Placement(gpus=0.5), GPUS, {}, (32, 1, 0.5)),
        (Placement(), ONE_CPU, {"tensor_parallel_size": 2}, (2, 1, 0)),
    ],
)
def test_there_are_as_many_engines_as_each_machine_has_room_for(
    spread, machines, engine_args, found
):
    assert settle(spread, machines, **engine_args) == found


@pytest.mark.parametrize(
    ("spread", "engine_args", "said"),
    [
        (Placement(), {"tensor_parallel_size": 16}, "needs 1 CPUs and 16 GPUs of one machine"),
        (Placement(cpus=65), {}, "needs 65 CPUs and 1 GPUs"),
        (Placement(engines=17), {}, r"ray.engines: expected at most 16"),
        (Placement(), {"tensor_parallel_size": "2"}, r"engine_args.tensor_parallel_size: expected"),
        (Placement(), {"data_parallel_size": 2}, r"engine_args.data_parallel_size: on Ray"),
    ],
)
def test_what_a_cluster_has_no_room_for_is_refused_by_name(spread, engine_args, said):
    with pytest.raises(SpecError, match=re.escape(said)):
        settle(spread, GPUS, **engine_args)


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"address": ""}, "ray.address"),
        ({"address": "ray://head:10001"}, "ray.address"),
        ({"engines": 0}, "ray.engines"),
        ({"cpus": -1}, "ray.cpus"),
        ({"gpus": "1"}, "ray.gpus"),
    ],
)
def test_malformed_fields_are_refused_by_name(fields, path):
    with pytest.raises(SpecError) as refused:
        Placement(**fields)
    assert refused.value.path == path


@given(st.integers(1, 10**6), st.integers(1, 600), st.integers(1, 2048))
def test_each_engine_has_several_chunks_and_more_than_it_runs_at_once(lines, engines, sequences):
    layout = EngineLayout(engines, 1, 0)
    size = layout.chunk_lines(lines)
    assert 1 <= size <= 64
    assert size == 1 or (size - 1) * 4 * engines < lines
    asked = job(Path("."), engine_args={"max_num_seqs": sequences})
    each = layout.chunks_each(asked, size)
    assert each * size >= 4 * sequences
    assert each >= 2


def test_a_source_that_nobody_can_count_has_whole_chunks():
    assert EngineLayout(3, 1, 0).chunk_lines(None) == 64


words = st.text(max_size=20)


@given(
    st.lists(st.builds(CapturedLine, st.integers(1, 9), st.integers(0, 9), st.integers(0, 9))),
    st.lists(st.builds(Failed, st.integers(1, 9), words)),
    st.none() | st.builds(StoreError, words) | st.builds(SpecError, words, words),
)
def test_outcomes_come_back_as_they_were(captured, failed, error):
    outcome = Outcome(3, tuple(captured), tuple(failed), error)
    found = Outcome.from_json(outcome.to_json())
    assert (found.chunk, found.captured, found.failed) == (3, outcome.captured, outcome.failed)
    assert type(found.error) is type(error)
    assert str(found.error) == str(error)


def test_what_is_raised_elsewhere_comes_back_as_what_midstream_raises():
    for kind in (StoreError, UnsupportedError, errors.TapError):
        found = unpack_error(pack_error(kind("why")))
        assert type(found) is kind
        assert str(found) == "why"
    path = unpack_error(pack_error(SpecError("capture", "why")))
    assert isinstance(path, SpecError)
    assert (path.path, path.problem) == ("capture", "why")
    foreign = unpack_error(pack_error(KeyError("x")))
    assert type(foreign) is EngineError
    assert str(foreign) == "KeyError: 'x'"


def test_a_ray_that_is_too_old_or_missing_is_refused_by_name(monkeypatch):
    import ray

    from midstream.lab.jobs.ray.cluster import import_ray

    assert import_ray() is ray
    monkeypatch.setattr(ray, "__version__", "2.54.1")
    with pytest.raises(UnsupportedError, match=r"Ray 2\.55 or later, and this is 2\.54\.1"):
        import_ray()
    from midstream.lab.jobs.ray.cluster import import_ray

    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UnsupportedError, match=r'pip install "midstream\[ray\]"'):
        import_ray()
