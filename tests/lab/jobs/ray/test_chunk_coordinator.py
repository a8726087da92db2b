"""What is known of chunks that are tried again: which line is at fault, and when to end."""

import asyncio
import functools
from datetime import datetime, timezone

import pytest

from midstream.lab.jobs.ray.chunk_coordinator import (
    CAREFUL,
    MORE_STARTS,
    STARTS_EACH,
    ChunkCoordinator,
)
from midstream.lab.jobs.records import Record

LINES = tuple((f"id-{line}", Record(line, f"prompt {line}")) for line in range(1, 5))


def in_a_loop(test):
    """Run an asynchronous test, for 20 seconds at most."""

    @functools.wraps(test)
    def run(*arguments, **named):
        asyncio.run(asyncio.wait_for(test(*arguments, **named), 20))

    return run


async def with_chunks(count):
    desk = ChunkCoordinator(1)
    for _ in range(count):
        await desk.put(LINES)
    return desk


@in_a_loop
async def test_chunks_are_offered_as_they_come_until_the_job_ends():
    desk = ChunkCoordinator(1)
    offers = [asyncio.ensure_future(desk.offers(number)) for number in range(3)]
    await asyncio.sleep(0.01)
    assert not any(offer.done() for offer in offers)
    await desk.put(LINES)
    assert await offers[0]
    assert not offers[1].done()
    await desk.put(LINES)
    await desk.end()
    assert [await offer for offer in offers] == [True, True, False]


@in_a_loop
async def test_a_job_that_is_halted_offers_and_hands_out_nothing_more():
    desk = await with_chunks(2)
    halted = asyncio.ensure_future(desk.halted(20))
    await asyncio.sleep(0.01)
    assert not halted.done()
    await desk.end(halt=True)
    assert (await halted, await desk.offers(1), await desk.begin(0)) == (True, False, None)


@in_a_loop
async def test_tries_are_counted_until_a_chunk_is_done_and_what_they_stored_is_after_since():
    desk = await with_chunks(1)
    turns = [await desk.begin(0) for _ in range(3)]
    assert [turn.number for turn in turns] == [1, 2, 3]
    assert turns[0].lines == LINES
    assert len({turn.since for turn in turns}) == 1
    # A shard of a machine whose clock is some minutes late is after it as well.
    assert turns[0].since < f"{datetime.now(timezone.utc):%Y%m%dT%H%M%S.%f}-0.safetensors"
    assert CAREFUL == 3
    await desk.done(0, 4)
    assert await desk.begin(0) is None


@in_a_loop
async def test_a_line_with_which_an_engine_ended_that_had_nothing_else_is_given_up():
    desk = await with_chunks(1)
    for _ in range(3):
        await desk.begin(0)
    await desk.run_alone(0, 1)
    await desk.run_alone(0, 2)
    await desk.broke("RuntimeError: out of memory")
    fourth = await desk.begin(0)
    await desk.run_alone(0, 3)
    await desk.run_alone(0, None)
    assert set(fourth.given_up) == {2}
    assert "3 engines ended" in fourth.given_up[2]
    assert fourth.given_up[2].endswith("RuntimeError: out of memory")
    assert (await desk.begin(0)).given_up == fourth.given_up


@pytest.mark.parametrize("engines", [1, 2, 5])
@in_a_loop
async def test_engines_are_not_started_for_ever_while_nothing_is_captured(engines):
    desk = ChunkCoordinator(engines)
    await desk.broke("RuntimeError: no memory")
    for _ in range(STARTS_EACH * engines + MORE_STARTS):
        assert await desk.join() == ""
    refused = await desk.join()
    assert "without capturing a line; last error: RuntimeError: no memory" in refused


@pytest.mark.parametrize("progress", ["captured", "survived"])
@in_a_loop
async def test_what_is_captured_between_lets_engines_be_started_again(progress):
    desk = await with_chunks(2)
    for _ in range(STARTS_EACH + MORE_STARTS):
        assert not await desk.join()
    if progress == "captured":
        await desk.done(0, 1)
    else:
        await desk.begin(0)
        await desk.run_alone(0, 1)
        await desk.run_alone(0, 2)
    assert await desk.join() == ""


@in_a_loop
async def test_lines_that_are_given_up_are_no_progress():
    desk = await with_chunks(1)
    for line in range(STARTS_EACH + MORE_STARTS + 1):
        refused = await desk.join()
        await desk.begin(0)
        await desk.run_alone(0, line)
    assert refused


@in_a_loop
async def test_the_first_engine_says_whether_it_has_started():
    desk = ChunkCoordinator(2)
    assert await desk.started(0.01) is None
    await desk.report(["SpecError", "model", "there is none"])
    await desk.report([])
    assert await desk.started(0.01) == ["SpecError", "model", "there is none"]
