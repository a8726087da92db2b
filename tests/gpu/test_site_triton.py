"""The Triton kernel against the reference op."""

import pytest
import torch
from support.sae_cases import assert_decoded, sae_case
from support.short_rows import check, every_case, short_case
from support.site_cases import (
    Step,
    assert_same,
    case,
    in_units,
    matrix_row,
    random_case,
    reading_case,
    same_bits,
)
from support.site_noops import NOOPS, NOOPS_OF_MAPS, noop_case

import midstream.ops.site  # noqa: F401
from midstream.ops.layout import Op
from midstream.ops.site_ref import site_ref

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def run_as_reference(case, exact=False):
    """Run a copy on the GPU, and the case by the reference; return the copy, which is the same."""
    found = case.copy("cuda")
    found.run()
    site_ref(*case.arguments())
    assert_same(found, case, exact=exact)
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 80, 576, 640, 1024, 4096, 5120])
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("max_steps", [0, 1, 9])
def test_the_kernel_does_what_the_reference_does(dtype, width, residual, max_steps):
    case = random_case(
        rows=37, width=width, dtype=dtype, residual=residual, max_steps=max_steps, seed=width
    )
    # Only sums over a row are taken in another order.
    run_as_reference(case, exact=max_steps == 0)


@pytest.mark.parametrize("seed", range(60))
def test_the_kernel_does_many_random_programs_as_the_reference_does(seed):
    options = {"rows": 1 + seed % 20, "width": [80, 576, 2048, 4096][seed % 4], "seed": seed}
    case = random_case(dtype=DTYPES[seed % 3], max_steps=12, residual=seed % 2 == 0, **options)
    run_as_reference(case)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [5, 300, 2000])
@pytest.mark.parametrize("width", [80, 4096, 5120])
def test_readings_alone_have_the_bits_of_readings_in_any_program(dtype, rows, width):
    known, unknown = reading_case(rows=rows, width=width, dtype=dtype, residual=rows != 300)
    wanted, before = known.copy(), known.copy()
    site_ref(*wanted.arguments())
    known, unknown = known.copy("cuda"), unknown.copy("cuda")
    known.run()
    unknown.run()
    assert same_bits(known.scores, unknown.scores)
    assert same_bits(known.hidden.cpu(), before.hidden)
    assert torch.equal(known.tally.cpu(), wanted.tally)
    # 12,000 sums in another order differ by more than those of a few random cases.
    torch.testing.assert_close(known.scores.cpu(), wanted.scores, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("seed", range(12))
def test_the_kernel_reads_and_captures_vectors_of_several_units_as_the_reference_does(seed):
    options = {"rows": 1 + seed % 20, "width": [80, 640, 1024, 14336][seed % 4], "seed": seed}
    made = random_case(dtype=DTYPES[seed % 3], max_steps=8, residual=seed % 2 == 0, **options)
    made = in_units(made, (2, 5)[seed % 2] if seed % 4 < 2 else (2, 8)[seed % 2])
    run_as_reference(made)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [80, 4096])
def test_plain_additions_are_the_references_to_the_last_bit(dtype, width):
    steps = [Step(Op.ADD, write=row, a=0.3 * row - 1) for row in range(6)]
    made = case([steps, steps[:2]], rows=9, width=width, dtype=dtype)
    run_as_reference(made, exact=True)


@pytest.mark.parametrize("name", NOOPS_OF_MAPS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_maps_that_add_up_to_nothing_leave_every_bit_in_place(name, dtype):
    made = noop_case(name, dtype=dtype, width=576).copy("cuda")
    before = made.hidden.clone()
    made.run()
    assert same_bits(made.hidden, before)


@pytest.mark.parametrize("name", NOOPS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [80, 1024, 4096, 5120, 16384])
@pytest.mark.parametrize("residual", [True, False])
def test_what_adds_up_to_nothing_leaves_every_bit_in_place(name, dtype, width, residual):
    made = noop_case(name, dtype=dtype, width=width, residual=residual).copy("cuda")
    before = made.hidden.clone()
    made.run()
    assert same_bits(made.hidden, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("residual", [True, False])
def test_a_result_is_the_asked_row_to_within_the_rounding_of_that_row(dtype, residual):
    for known in every_case():
        if (known["dtype"], known["residual"]) == (dtype, residual):
            check(short_case(**known), known["name"], known["size"], _run_on_a_gpu)


def _run_on_a_gpu(made):
    found = made.copy("cuda")
    found.run()
    made.hidden = found.hidden.cpu()
    made.residual = None if found.residual is None else found.residual.cpu()


@pytest.mark.parametrize("rows", [1, 16, 17, 130])
@pytest.mark.parametrize("width", [80, 576, 4096])
@pytest.mark.parametrize("dtype", DTYPES)
def test_maps_and_what_comes_after_them_are_those_of_the_reference(dtype, width, rows):
    """In tiles of few and of many rows, with three matrices among them."""
    made = random_case(
        rows=rows, width=width, dtype=dtype, residual=rows != 17, max_steps=3, seed=rows, maps=3
    )
    run_as_reference(made)


@pytest.mark.parametrize("rows", [5, 70])
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_of_maps_have_an_error_far_below_half_precision(dtype, rows):
    width = 1024
    step = Step(Op.MAP, read=matrix_row(0, width), write=1, a=1.0)
    made = case([[step]], rows=rows, width=width, dtype=dtype, captures=False, maps=1)
    found = made.copy("cuda")
    found.run()
    matrix = made.bank[step.read :][:width].double()
    stream = made.hidden.float() + made.residual.float()
    wanted, size = stream.double() @ matrix.T, stream.double().abs() @ matrix.abs().T
    error = (found.mapped[:rows].cpu().double() - wanted).abs() / size
    assert float(error.max()) < 2e-6


@pytest.mark.parametrize("rows", [3, 300])
@pytest.mark.parametrize("width", [576, 4096])
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_kernel_that_is_launched_again_does_the_same_for_another_stream(
    rows, width, residual, dtype
):
    made = random_case(
        rows=rows, width=width, dtype=dtype, residual=residual, max_steps=3, seed=rows + width
    )
    found = made.copy("cuda")
    tap = found.bound()[2:]
    for nth in range(3):
        for each in (made, found):
            generator = torch.Generator().manual_seed(nth)
            device = each.hidden.device
            each.hidden = torch.randn(rows, width, generator=generator).to(device, dtype)
            if residual:
                each.residual = torch.randn(rows, width, generator=generator).to(device, dtype)
        torch.ops.midstream.site(found.hidden, found.residual, *tap)
        site_ref(*made.arguments())
        assert_same(found, made, exact=False)
    assert len(found.relaunches[found.table.data_ptr()]) == 1


@pytest.mark.parametrize("maps", [0, 2])
@pytest.mark.parametrize("width", [576, 4096])
def test_the_kernel_replays_in_a_graph_over_new_contents(width, maps):
    """At both ways of launching: after the kernels ahead, and dependent on them."""
    options = {"rows": 16, "width": width, "dtype": torch.bfloat16, "max_steps": 3, "maps": maps}
    cases = [random_case(seed=seed, **options) for seed in (2, 3)]
    for name in ("instructions", "params", "lists"):
        # Of one size, as buffers are.
        rows = max(len(getattr(each, name)) for each in cases)
        for each in cases:
            value = getattr(each, name)
            whole = value.new_zeros(rows, *value.shape[1:])
            whole[: len(value)] = value.nan_to_num()
            setattr(each, name, whole)
    made = cases[0].copy("cuda")
    made.copy("cuda").run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made.run()
        # A second one, launched as dependent on the first, must see all that it wrote.
        made.run()
    for fresh in cases:
        for name, value in vars(fresh).items():
            if isinstance(value, torch.Tensor):
                getattr(made, name).copy_(value)
        graph.replay()
        for _ in range(2):
            site_ref(*fresh.arguments())
        assert_same(made, fresh, exact=False)


def test_a_kernel_of_aligned_rows_is_not_used_for_others():
    options = {"rows": 8, "width": 64, "dtype": torch.bfloat16, "max_steps": 3}
    for seed, offset in ((1, 0), (2, 0), (3, 1), (4, 0), (5, 3)):
        case = random_case(seed=seed, **options)
        found = case.copy("cuda")
        memory = torch.zeros(8 * 64 + offset, dtype=torch.bfloat16, device="cuda")
        found.hidden = memory[offset:].view(8, 64).copy_(found.hidden)
        found.run()
        site_ref(*case.arguments())
        assert_same(found, case, exact=False)


def test_rows_that_are_strided_are_read_and_written_in_place():
    case = random_case(rows=8, width=64, dtype=torch.float32, residual=True, max_steps=3, seed=4)
    found = case.copy("cuda")
    wide = torch.full((8, 128), 5.0, device="cuda")
    wide[:, :64] = found.hidden
    found.hidden = wide[:, :64]
    found.run()
    site_ref(*case.arguments())
    assert_same(found, case, exact=False)
    assert bool((wide[:, 64:] == 5.0).all())


def test_dependent_launches_are_for_few_wide_rows():
    from midstream.ops.site_triton import _dependent_launch

    device = torch.device("cuda", torch.cuda.current_device())
    recent = torch.cuda.get_device_capability(device)[0] >= 9
    assert _dependent_launch(1, 4096, device) == _dependent_launch(16, 2048, device) == recent
    assert not _dependent_launch(17, 4096, device)
    assert not _dependent_launch(1, 1024, device)
    assert not _dependent_launch(1, 4096, torch.device("cpu"))


def test_rows_that_do_not_fit_a_programs_registers_are_refused():
    made = case([[]], rows=1, width=32769, captures=False).copy("cuda")
    with pytest.raises(ValueError, match="at most 32768 wide"):
        made.run()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("rows", "at_once"), [(7, 64), (70, 64), (33, 12)])
def test_saes_reconstruct_on_the_device_as_in_the_reference(seed, rows, at_once):
    made = sae_case(
        rows=rows, width=(24, 72, 576)[seed % 3], dtype=DTYPES[seed % 3], residual=seed % 2 == 0,
        seed=seed, at_once=at_once,
    )  # fmt: skip
    assert_decoded(run_as_reference(made), made)
