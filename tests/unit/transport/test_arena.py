"""The arena: a log of shared segments, each used again when nobody needs anything in it."""

import os
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.open_files import open_files
from support.stored import SEGMENT, check_idle, make_arena

from midstream.transport.reader import MappedArena


def take(arena, nbytes):
    extent = arena.take(nbytes)
    assert extent is not None
    return extent


def reader_of(arena, *segments):
    """A reader that has learnt of segments."""
    reader = MappedArena(arena.leases.address)
    reader.update(arena.describe(segments), [])
    return reader


def leased(arena, reader, segments):
    """Tensors over segments that the reader has learnt of."""
    arrays = reader.lease(arena.lease(segments), segments)
    return {segment: torch.from_numpy(array) for segment, array in arrays.items()}


def test_what_is_taken_follows_what_was_taken_before_and_never_overlaps():
    arena = make_arena()
    extents = [take(arena, 100) for _ in range(30)]
    assert {extent.segment for extent in extents} == {0}
    assert [extent.offset for extent in extents] == [128 * n for n in range(30)]
    for n, extent in enumerate(extents):
        extent.memory.fill_(n)
    assert all(bool((extent.memory == n).all()) for n, extent in enumerate(extents))


def test_a_segment_is_used_again_when_nobody_needs_anything_in_it():
    arena = make_arena()
    first, second, third = (take(arena, SEGMENT) for _ in range(3))
    assert [one.segment for one in (first, second, third)] == [0, 1, 2]
    arena.release([second.segment])
    assert take(arena, SEGMENT).segment == 1
    assert arena.used["memory_bytes"] == 3 * SEGMENT


def test_what_does_not_fit_a_segment_has_one_of_its_own_of_one_of_few_sizes():
    arena = make_arena()
    large = take(arena, 3 * SEGMENT)
    assert large.memory.numel() == 3 * SEGMENT
    assert arena.used["memory_bytes"] == 4 * SEGMENT
    take(arena, 2 * SEGMENT)
    arena.release([large.segment])
    # A little more or less than before finds the same segment.
    assert take(arena, 3 * SEGMENT + 7).segment == large.segment


def test_beyond_the_budget_all_is_let_in_by_block_for_the_front_door_has_counted_it():
    arena = make_arena(budget=2 * SEGMENT)
    for _ in range(5):
        take(arena, SEGMENT)
    assert arena.used["memory_bytes"] == 5 * SEGMENT


def test_beyond_the_budget_segments_are_files_without_a_name_that_go_when_they_are_free(tmp_path):
    arena = make_arena(2 * SEGMENT, "spill", str(tmp_path))
    extents = [take(arena, SEGMENT) for _ in range(5)]
    arena.describe([extent.segment for extent in extents])
    assert arena.used["memory_bytes"] == 2 * SEGMENT
    assert arena.used["disk_bytes"] == 3 * SEGMENT
    assert list(tmp_path.iterdir()) == []
    for n, extent in enumerate(extents):
        extent.memory.fill_(n)
    assert all(bool((extent.memory == n).all()) for n, extent in enumerate(extents))
    arena.release(extent.segment for extent in extents)
    check_idle(arena)
    assert arena.used["disk_bytes"] == 0
    assert arena.take_retired() == [2, 3, 4]
    assert arena.take_retired() == []
    # There is memory again.
    assert take(arena, SEGMENT).segment in (0, 1)


def test_each_reader_hears_of_the_segments_it_knows_that_are_gone(tmp_path):
    arena = make_arena(SEGMENT, "spill", str(tmp_path))
    kept, *gone, _ = [take(arena, SEGMENT) for _ in range(4)]
    arena.describe([kept.segment, gone[0].segment], reader=0)
    arena.describe([gone[0].segment, gone[1].segment], reader=1)
    arena.release(extent.segment for extent in gone)
    assert arena.take_retired(0) == [gone[0].segment]
    assert arena.take_retired(1) == [gone[0].segment, gone[1].segment]
    assert arena.take_retired(0) == arena.take_retired(1) == arena.take_retired(2) == []


def test_a_folder_that_is_not_there_is_told_of(tmp_path):
    arena = make_arena(SEGMENT, "spill", str(tmp_path / "gone"))
    take(arena, SEGMENT)
    with pytest.raises(FileNotFoundError):
        arena.take(SEGMENT)


def test_beyond_the_budget_what_comes_is_dropped_until_there_is_room_for_it():
    arena = make_arena(2 * SEGMENT, "drop")
    first, _ = take(arena, SEGMENT), take(arena, SEGMENT)
    assert arena.take(SEGMENT) is None
    assert arena.take(1) is None
    arena.release([first.segment])
    assert take(arena, SEGMENT).segment == first.segment
    arena = make_arena(SEGMENT, "drop")
    first = take(arena, SEGMENT // 2)
    assert arena.take(SEGMENT) is None
    assert take(arena, SEGMENT // 2).segment == first.segment
    arena.release([first.segment, first.segment])
    assert take(arena, SEGMENT).segment == first.segment


def test_free_segments_that_are_too_small_make_room_for_a_large_one():
    arena = make_arena(4 * SEGMENT, "drop")
    small = [take(arena, SEGMENT) for _ in range(3)]
    arena.describe([extent.segment for extent in small])
    arena.release(extent.segment for extent in small)
    assert take(arena, 4 * SEGMENT).memory.numel() == 4 * SEGMENT
    assert arena.used["memory_bytes"] == 4 * SEGMENT
    assert arena.take_retired()


@settings(max_examples=100)
@given(st.integers(0, 10**6), st.sampled_from(["block", "spill"]))
def test_whatever_is_held_keeps_its_bytes(seed, overflow):
    draw = random.Random(seed)
    arena = make_arena(3 * SEGMENT, overflow)
    reader = reader_of(arena)
    held = []  # (value, extent or the reader's tensors)
    for value in range(60):
        extent = take(arena, draw.choice([1, 100, 1000, SEGMENT, 2 * SEGMENT + 5]))
        extent.memory.fill_(value)
        held.append((value, extent))
        draw.shuffle(held)
        while held and draw.random() < 0.5:
            value, one = held.pop()
            if not isinstance(one, torch.Tensor):
                assert bool((one.memory == value).all())
                if draw.random() < 0.5:
                    places = arena.describe([one.segment])
                    reader.update(places, arena.take_retired())
                    size = one.memory.numel()
                    # Its user is the reader from here on.
                    tensors = leased(arena, reader, [one.segment])
                    held.append((value, tensors[one.segment][one.offset :][:size]))
                else:
                    arena.release([one.segment])
                del one
        for value, one in held:
            memory = one if isinstance(one, torch.Tensor) else one.memory
            assert bool((memory == value).all())
    memory = None
    for _, one in held:
        if not isinstance(one, torch.Tensor):
            arena.release([one.segment])
    held.clear()
    one = tensors = None
    check_idle(arena)
    assert reader.held == 0


def test_a_lease_ends_once_when_the_last_tensor_that_shares_its_memory_is_gone():
    arena = make_arena()
    extent = take(arena, 400)
    extent.memory.copy_(torch.arange(400) % 251)
    reader = reader_of(arena, extent.segment)
    tensors = leased(arena, reader, [extent.segment])
    whole = tensors[extent.segment]
    assert whole.data_ptr() != extent.memory.data_ptr(), "it is mapped a second time"
    part = whole[extent.offset :][:400].view(torch.float32)[3:]
    del whole, tensors
    arena.sweep()
    assert arena.used["leases"] == 1
    assert part.view(torch.uint8).tolist() == [n % 251 for n in range(12, 400)]
    assert reader.held == SEGMENT
    numbers = part.numpy()  # NumPy's view of it counts as well
    del part
    arena.sweep()
    assert arena.used["leases"] == 1
    del numbers
    check_idle(arena)
    assert reader.held == 0


def test_a_lease_over_several_segments_ends_with_the_last():
    arena = make_arena()
    extents = [take(arena, SEGMENT) for _ in range(3)]
    segments = [extent.segment for extent in extents]
    reader = reader_of(arena, *segments)
    tensors = leased(arena, reader, segments)
    for segment in segments:
        arena.sweep()
        assert arena.used["leases"] == 1
        del tensors[segment]
    check_idle(arena)


def test_what_a_reader_writes_is_its_own_and_later_rows_are_not_touched():
    arena = make_arena()
    extent = take(arena, 100)
    reader = reader_of(arena, extent.segment)
    tensors = leased(arena, reader, [extent.segment])
    tensors[extent.segment][:100].fill_(9)
    tensors.clear()
    arena.sweep()
    again = take(arena, 100)
    assert again.segment == extent.segment
    again.memory.fill_(3)
    reader.update(arena.describe([again.segment]), [])
    tensors = leased(arena, reader, [again.segment])
    assert tensors[again.segment][:100].tolist() == [3] * 100


def test_memory_of_a_segment_that_is_gone_stays_until_its_last_tensor():
    arena = make_arena(SEGMENT, "spill", "/tmp")
    take(arena, SEGMENT)
    spilled = take(arena, SEGMENT)
    spilled.memory.fill_(5)
    reader = reader_of(arena, spilled.segment)
    tensors = leased(arena, reader, [spilled.segment])
    copy = tensors[spilled.segment][:]
    del tensors
    reader.update({}, [spilled.segment])
    assert copy.tolist() == [5] * SEGMENT


def test_another_process_of_the_same_number_is_not_taken_for_the_worker():
    arena = make_arena()
    wrong = replace(arena.leases.address, token="00" * 16)
    with pytest.raises(OSError, match="is not the worker"):
        MappedArena(wrong)
    with pytest.raises(OSError, match="No such"):
        MappedArena(replace(arena.leases.address, pid=2**22 + 1))


def test_an_arena_leaves_no_name_anywhere_and_no_open_file_when_it_is_gone(tmp_path):
    def names():
        return sorted(os.listdir("/dev/shm")), sorted(os.listdir(tmp_path))

    before, opened = names(), open_files()
    arena = make_arena(SEGMENT, "spill", str(tmp_path))
    for _ in range(4):
        take(arena, SEGMENT)
    assert names() == before
    arena.close()
    assert open_files() <= opened
