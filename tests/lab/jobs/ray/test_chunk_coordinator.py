"""What is known of chunks that are tried again: which line is at fault, and when to end."""

import asyncio
from datetime import datetime, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.lab.jobs.ray.chunk_coordinator import (
    CAREFUL,
    MORE_STARTS,
    STARTS_EACH,
    ChunkCoordinator,
)
from midstream.lab.jobs.records import Record

LINES = tuple((f"id-{line}", Record(line, f"prompt {line}")) for line in range(1, 5))


def run(work):
    return asyncio.run(asyncio.wait_for(work, 20))


def test_chunks_are_offered_as_they_come_until_the_job_ends():
    async def work():
        desk = ChunkCoordinator(1)
        offers = [asyncio.ensure_future(desk.offers(number)) for number in range(3)]
        await asyncio.sleep(0.01)
        assert not any(each.done() for each in offers)
        await desk.put(LINES)
        assert await offers[0]
        assert not offers[1].done()
        await desk.put(LINES)
        await desk.end()
        return [await each for each in offers]

    assert run(work()) == [True, True, False]


def test_a_job_that_is_halted_offers_and_hands_out_nothing_more():
    async def work():
        desk = ChunkCoordinator(1)
        await desk.put(LINES)
        await desk.put(LINES)
        halted = asyncio.ensure_future(desk.halted(20))
        await asyncio.sleep(0.01)
        assert not halted.done()
        await desk.end(halt=True)
        return await halted, await desk.offers(1), await desk.begin(0)

    assert run(work()) == (True, False, None)


def test_a_chunk_that_is_done_is_not_tried_again():
    async def work():
        desk = ChunkCoordinator(1)
        await desk.put(LINES)
        first = await desk.begin(0)
        await desk.done(0, 4)
        return first, await desk.begin(0)

    first, again = run(work())
    assert first.lines == LINES
    assert again is None


def test_tries_are_counted_and_what_an_earlier_one_stored_is_after_since():
    async def work():
        desk = ChunkCoordinator(1)
        await desk.put(LINES)
        return [await desk.begin(0) for _ in range(3)]

    turns = run(work())
    assert [each.number for each in turns] == [1, 2, 3]
    assert len({each.since for each in turns}) == 1
    # A shard of a machine whose clock is some minutes late is after it as well.
    assert turns[0].since < f"{datetime.now(timezone.utc):%Y%m%dT%H%M%S.%f}-0.safetensors"
    assert CAREFUL == 3


def test_a_line_with_which_an_engine_ended_that_had_nothing_else_is_given_up():
    async def work():
        desk = ChunkCoordinator(1)
        await desk.put(LINES)
        for _ in range(3):
            await desk.begin(0)
        await desk.run_alone(0, 1)
        await desk.run_alone(0, 2)
        await desk.broke("RuntimeError: out of memory")
        fourth = await desk.begin(0)
        await desk.run_alone(0, 3)
        await desk.run_alone(0, None)
        return fourth, await desk.begin(0)

    fourth, fifth = run(work())
    assert set(fourth.given_up) == {2}
    assert "3 engines ended" in fourth.given_up[2]
    assert fourth.given_up[2].endswith("RuntimeError: out of memory")
    assert fifth.given_up == fourth.given_up


@given(st.integers(1, 5))
def test_engines_are_not_started_for_ever_while_nothing_is_captured(engines):
    async def work():
        desk = ChunkCoordinator(engines)
        await desk.broke("RuntimeError: no memory")
        return [await desk.join() for _ in range(STARTS_EACH * engines + MORE_STARTS + 1)]

    *allowed, refused = run(work())
    assert set(allowed) == {""}
    assert "without capturing a line; last error: RuntimeError: no memory" in refused


@pytest.mark.parametrize("progress", ["captured", "survived"])
def test_what_is_captured_between_lets_engines_be_started_again(progress):
    async def work():
        desk = ChunkCoordinator(1)
        await desk.put(LINES)
        await desk.put(LINES)
        for _ in range(STARTS_EACH + MORE_STARTS):
            assert not await desk.join()
        if progress == "captured":
            await desk.done(0, 1)
        else:
            await desk.begin(0)
            await desk.run_alone(0, 1)
            await desk.run_alone(0, 2)
        return await desk.join()

    assert run(work()) == ""


def test_lines_that_are_given_up_are_no_progress():
    async def work():
        desk = ChunkCoordinator(1)
        await desk.put(LINES)
        said = []
        for line in range(STARTS_EACH + MORE_STARTS + 1):
            said.append(await desk.join())
            await desk.begin(0)
            await desk.run_alone(0, line)
        await desk.done(0, 0)
        return said

    assert [bool(each) for each in run(work())][-1]
