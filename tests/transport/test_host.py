"""Rows on their way from the ring to host memory."""

from __future__ import annotations

import pytest
import torch

from midstream.transport.host import CpuTransport, CudaTransport, host_transport

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def ring(rows=8, width=3, device="cpu"):
    return torch.arange(rows * width, dtype=torch.float32, device=device).view(rows, width)


def tally(rows=4, device="cpu"):
    return torch.arange(rows * 4, dtype=torch.int32, device=device).view(rows, 4)


def scores(rows=4, device="cpu"):
    return torch.arange(rows * 2, dtype=torch.float32, device=device).view(rows, 2)


def test_a_ring_on_the_cpu_gets_the_transport_of_the_cpu():
    assert isinstance(host_transport(ring()), CpuTransport)


def test_a_shipment_has_the_rows_and_the_tally_of_its_step():
    source = ring()
    transport = host_transport(source)
    assert transport.capacity == 8
    first = transport.reserve(5)
    shipment = transport.ship(first, 5, tally(), scores())
    assert shipment.ready()
    assert torch.equal(shipment.rows(), ring()[:5])
    assert torch.equal(shipment.tally(), tally())
    assert torch.equal(shipment.scores(), scores())


def test_what_was_shipped_does_not_change_with_the_next_step():
    source, counts, read = ring(), tally(), scores()
    transport = host_transport(source)
    shipment = transport.ship(transport.reserve(8), 8, counts, read)
    for each in (source, counts, read):
        each.zero_()
    assert torch.equal(shipment.rows(), ring())
    assert torch.equal(shipment.tally(), tally())
    assert torch.equal(shipment.scores(), scores())


def test_a_copy_is_of_what_was_there_when_it_was_sent():
    positions = torch.arange(4)
    copy = host_transport(ring()).copy(positions)
    positions.zero_()
    assert copy.values().tolist() == [0, 1, 2, 3]


def test_a_step_that_captures_nothing_still_ships_its_tally():
    transport = host_transport(ring())
    shipment = transport.ship(transport.reserve(0), 0, tally(), scores(0))
    assert shipment.rows().shape == (0, 3)
    assert torch.equal(shipment.tally(), tally())
    assert shipment.scores().shape == (0, 2)


def test_rows_keep_the_rings_dtype():
    transport = host_transport(ring().bfloat16())
    assert transport.ship(0, 2, tally(), scores(0)).rows().dtype == torch.bfloat16


def test_a_step_may_fill_the_ring_but_no_more():
    transport = host_transport(ring())
    assert transport.reserve(8) == 0
    with pytest.raises(AssertionError, match="captures 9 rows, .* holds 8: .*staging_bytes"):
        transport.reserve(9)


# ---------------------------------------------------------------- CUDA


@needs_cuda
@pytest.mark.gpu
def test_a_ring_on_cuda_gets_the_transport_of_cuda():
    assert isinstance(host_transport(ring(device="cuda")), CudaTransport)


@needs_cuda
@pytest.mark.gpu
def test_rows_arrive_in_pinned_memory_as_they_were_when_shipped():
    source, counts, read = ring(device="cuda"), tally(device="cuda"), scores(device="cuda")
    transport = host_transport(source)
    first = transport.reserve(5)
    shipment = transport.ship(first, 5, counts, read)
    counts.zero_()
    read.zero_()
    assert torch.equal(shipment.rows(), ring()[:5])
    assert torch.equal(shipment.tally(), tally())
    assert torch.equal(shipment.scores(), scores())
    assert shipment.ready()
    assert shipment.rows().is_pinned()
    assert shipment.scores().is_pinned()


@needs_cuda
@pytest.mark.gpu
def test_steps_that_lap_the_ring_while_copies_are_under_way_lose_nothing():
    rows, width, steps = 64, 4096, 200
    source = torch.zeros(rows, width, device="cuda")
    transport = host_transport(source)
    shipments = []
    for step in range(steps):
        count = 1 + step * 7 % 40
        first = transport.reserve(count)
        assert first + count <= rows
        source[first : first + count] = float(step)
        read = torch.full((5, 2), float(step), device="cuda")
        shipments.append((step, count, transport.ship(first, count, tally(device="cuda"), read)))
        read.fill_(-1)
    for step, count, shipment in shipments:
        assert bool((shipment.scores() == float(step)).all())
        assert shipment.rows().shape == (count, width)
        assert bool((shipment.rows() == float(step)).all()), f"step {step} was overwritten"


@needs_cuda
@pytest.mark.gpu
def test_a_step_without_captures_ships_its_tally_from_cuda():
    transport = host_transport(ring(device="cuda"))
    counts = tally(device="cuda")
    shipment = transport.ship(transport.reserve(0), 0, counts, scores(0, device="cuda"))
    assert shipment.rows().shape == (0, 3)
    assert shipment.scores().shape == (0, 2)
    assert torch.equal(shipment.tally(), tally())


@needs_cuda
@pytest.mark.gpu
def test_on_cuda_a_copy_arrives_before_what_is_queued_after_it():
    positions = torch.arange(4, device="cuda")
    copy = host_transport(ring(device="cuda")).copy(positions)
    torch.cuda._sleep(10**9)
    later = torch.cuda.Event()
    positions.zero_()
    later.record()
    assert copy.values().tolist() == [0, 1, 2, 3]
    assert not later.query(), "it was waited for work that was queued after the copy"
    torch.cuda.synchronize()
