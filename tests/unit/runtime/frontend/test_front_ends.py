"""Several front ends of one engine: their parts of its capacity never add up to more."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.stored import worker_info

from midstream.config.config import Config
from midstream.config.http import HttpSettings, divided
from midstream.errors import SpecError
from midstream.runtime.frontend.engine_info import FrontEnds, describe
from midstream.runtime.frontend.request.budget import Need, _limits, check_tables, row_limit
from midstream.runtime.frontend.request.sent_vectors import SentVectors
from midstream.runtime.frontend.rpc.remote_worker import RemoteWorker
from midstream.runtime.protocol.segments import Room

SIZES = st.integers(3, 5000)


def config(count: int, rank: int) -> SimpleNamespace:
    parallel = SimpleNamespace(_api_process_count=count, _api_process_rank=rank)
    return SimpleNamespace(parallel_config=parallel)


def test_their_number_is_that_of_the_api_server_process():
    assert FrontEnds.of(config(1, 0)) == FrontEnds()
    assert FrontEnds.of(config(3, 2)) == FrontEnds(3, 2)
    assert FrontEnds.of(config(3, -1)) == FrontEnds(3, 0)  # the process that starts them


@given(st.builds(Room, SIZES, SIZES, SIZES, SIZES, SIZES, SIZES, SIZES), st.integers(1, 9))
def test_their_parts_of_the_tables_fit_together(room: Room, count: int):
    part = FrontEnds(count, count - 1).room(room)
    for kind, limit in _limits(part).items():
        assert count * max(0, limit) <= _limits(room)[kind]
        assert limit >= (_limits(room)[kind] - 2 * count) // count
    assert part.probes == room.probes, "scores are those of one token"
    assert count * part.gate_states <= room.gate_states
    assert FrontEnds().room(room) == room


def test_a_request_that_exceeds_the_part_is_rejected_as_one_that_exceeds_the_whole():
    room = Room(10, 10, 10, 10, 4)
    info = describe([[worker_info(taps=(("resid_post", 0),), room=room)]], FrontEnds(2, 1))
    assert info.room.bank_rows == 5
    with pytest.raises(SpecError, match=r"needs 6 vectors, and there is room for 5"):
        check_tables(Need({"bank_rows": {"v": 6}}), info.room)


def test_rows_readouts_sums_and_states_are_divided():
    settings = Config(readout_rows=100, reductions=9, gate_states=5)
    workers = [RemoteWorker(worker_info(arena_bytes=1000), number, 3) for number in range(2)]
    found = row_limit(workers, settings, 3)
    assert found.limits == {"rows": 666, "readout_rows": 33, "reductions": 3, "gate_states": 1}
    assert "rows" not in row_limit(workers, Config(overflow="spill"), 3).limits


def test_updates_of_vectors_name_their_front_end():
    from support.plans import VECTORS

    update = SentVectors(front_end=2, front_ends=4).take("u", [VECTORS[0]])
    assert update is not None
    assert update.front_end == 2


def test_limits_of_clients_are_divided_and_none_becomes_nothing():
    one, part = HttpSettings(running_sweeps=2), divided(HttpSettings(running_sweeps=2), 4)
    names = HttpSettings.__struct_fields__
    changed = {name for name in names if getattr(one, name) != getattr(part, name)}
    assert changed == {
        "held_bytes", "held_captures", "client_bytes", "client_captures", "waiting_requests",
        "running_sweeps",
    }  # fmt: skip
    assert (part.held_bytes, part.running_sweeps) == (one.held_bytes // 4, 1)
    assert divided(one, 1) == one
