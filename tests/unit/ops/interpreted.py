"""The Triton kernels on the CPU, in Triton's interpreter, compared with their references.

A program of its own: the interpreter is chosen by `TRITON_INTERPRET=1` before Triton is imported.
"""

import functools
import sys
from pathlib import Path
from typing import Any

import torch
from triton.runtime import interpreter

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from support.attention_scores import check_without_a_gpu
from support.dose_cases import assert_doses, dose_case, wanted_doses
from support.gate_memory import check_steps
from support.nightly import NIGHTLY, rounds
from support.sae_cases import assert_decoded, sae_case
from support.short_rows import check, every_case, short_case
from support.site_cases import (
    Step,
    assert_same,
    case,
    in_units,
    random_case,
    reading_case,
    same_bits,
)
from support.site_noops import NOOPS, NOOPS_OF_MAPS, noop_case

from midstream.ops import layout
from midstream.ops.layout import Flags, Op
from midstream.ops.scan.launch import scan_triton
from midstream.ops.site_ref import site_ref
from midstream.ops.site_triton import site_triton

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def quicken() -> None:
    """Have the interpreter prepare Triton's language once in a launch for each module, not for each
    call of a function; and look types up, in place of a table that it makes for each value.
    """
    prepare, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    type_of = interpreter._get_np_dtype
    type_of_numbers = functools.cache(type_of)
    prepared: set[str] = set()

    def prepare_once(function: Any) -> Any:
        if function.__module__ in prepared:
            return None
        prepared.add(function.__module__)
        return prepare(function)

    def launch_anew(*args: Any, **options: Any) -> Any:
        prepared.clear()
        return launch(*args, **options)

    interpreter._patch_lang = prepare_once
    interpreter.GridExecutor.__call__ = launch_anew
    interpreter._get_np_dtype = lambda kind: (
        type_of(kind) if kind.scalar.is_ptr() else type_of_numbers(kind.scalar)
    )


def main() -> None:
    edited = 0
    # Each combination once, or each pair of a width and a dtype.
    for seed in range(0 if NIGHTLY else 9, 18):
        made = random_case(
            rows=7,
            width=(1, 20, 80)[seed % 3],
            dtype=DTYPES[seed // 3 % 3],
            residual=seed % 2 == 0,
            max_steps=(0, 3, 10)[seed // 2 % 3],
            seed=seed,
        )
        before, wanted = made.hidden.clone(), made.copy()
        site_ref(*wanted.arguments())
        site_triton(*made.arguments())
        assert_same(made, wanted, exact=False)
        edited += int((made.hidden != before).any(1).sum())
    assert edited > 20, edited
    for seed in range(rounds(suite=3, nightly=6)):
        made = random_case(
            rows=7, width=40, dtype=DTYPES[seed % 3], residual=seed % 2 == 0, max_steps=6, seed=seed
        )
        made = in_units(made, (2, 5)[seed % 2])
        wanted = made.copy()
        site_ref(*wanted.arguments())
        site_triton(*made.arguments())
        assert_same(made, wanted, exact=False)
    for nth, dtype in enumerate(DTYPES):
        seed = nth + 7  # of which each has rows that are not finite
        made = random_case(rows=7, width=20, dtype=dtype, residual=nth > 0, max_steps=6, seed=seed)
        made.params[:, : layout.C] *= 1e30  # not the number of an activation
        made.params[:, layout.D] *= 1e30
        made.hidden[2, 3] = float("nan")
        wanted = made.copy()
        site_ref(*wanted.arguments())
        site_triton(*made.arguments())
        assert bool(made.hidden[:2].isfinite().all())
        assert torch.equal(made.tally, wanted.tally)
        assert int(made.tally[:, layout.NONFINITE].sum()) > 1
    # Of several tiles: of columns and of the sum, and of rows.
    for seed, (rows, width) in enumerate(((5, 140), (66, 72), (19, 40))):
        made = random_case(
            rows=rows, width=width, dtype=DTYPES[seed], residual=seed != 1, max_steps=1, seed=seed,
            maps=3,
        )  # fmt: skip
        made = in_units(made, (1, 4, 2)[seed])
        before, wanted = made.hidden.clone(), made.copy()
        site_ref(*wanted.arguments())
        site_triton(*made.arguments())
        assert_same(made, wanted, exact=False)
        assert bool((made.hidden != before).any())
    # Of SAEs: of several tiles, and of more rows than there is room for activations at a time.
    for seed, (rows, width, at_once) in enumerate(((5, 72, 64), (14, 40, 12))):
        made = sae_case(
            rows=rows, width=width, dtype=DTYPES[seed], residual=seed != 1, seed=seed,
            at_once=at_once,
        )  # fmt: skip
        if seed == 1:
            made = in_units(made, 4)
        before, wanted = made.hidden.clone(), made.copy()
        site_ref(*wanted.arguments())
        site_triton(*made.arguments())
        assert_same(made, wanted, exact=False)
        assert_decoded(made, wanted)
        assert int((made.hidden != before).any(1).sum()) > rows // 3
    # Readings alone have the bits of readings in any program, and leave rows as they are.
    for nth, dtype in enumerate(DTYPES):
        known, unknown = reading_case(rows=5, width=20, dtype=dtype, residual=nth != 1, seed=nth)
        is_finite = nth > 0
        if not is_finite:
            known.hidden[:, 3] = unknown.hidden[:, 3] = float("nan")
        before, wanted = known.copy(), known.copy()
        site_ref(*wanted.arguments())
        site_triton(*unknown.arguments())
        site_triton(*known.arguments())
        assert same_bits(known.scores, unknown.scores)
        assert same_bits(known.hidden, before.hidden)
        assert torch.equal(known.tally, wanted.tally)
        assert bool(known.tally[:, layout.NONFINITE].any()) == (not is_finite)
        if is_finite:
            assert_same(known, wanted, exact=False)
    for nth, name in enumerate([*NOOPS, *NOOPS_OF_MAPS]):
        made = noop_case(name, rows=2, width=20, dtype=DTYPES[nth % 3], residual=nth % 2 == 0)
        before = made.hidden.clone()
        site_triton(*made.arguments())
        assert same_bits(made.hidden, before), name
    # What the mask of an edit of the whole row leaves out keeps the bits of both halves.
    made = case(
        [[Step(Op.REPLACE, write=1, a=1.0, mask=11)]], rows=3, width=20, dtype=torch.bfloat16,
        captures=False,
    )  # fmt: skip
    kept, before = made.bank[11, :20] == 0, made.copy()
    site_triton(*made.arguments())
    assert 0 < int(kept.sum()) < 20
    assert same_bits(made.hidden[:, kept], before.hidden[:, kept])
    assert same_bits(made.residual[:, kept], before.residual[:, kept])
    assert not same_bits(made.hidden, before.hidden)
    # Results that are far shorter or longer than the stream.
    for known in list(every_case())[:: rounds(suite=5, nightly=1)]:
        check(
            short_case(**known),
            known["name"],
            known["size"],
            lambda made: site_triton(*made.arguments()),
        )
    for nth, dtype in enumerate(DTYPES):
        made, programs = dose_case(rows=14, width=20, dtype=dtype, residual=nth != 1)
        wanted = wanted_doses(made, programs)
        site_triton(*made.arguments())
        assert_doses(made, wanted)
    # A score that is there already is counted by its token's program, and left as it is.
    scan = Step(Op.SCAN, slot=2, b=1.0, flags=Flags.COUNTED | Flags.STEP)
    gate = Step(Op.GATE, slot=2, flags=Flags.STEP)
    made = case(
        [[gate, Step(Op.ADD, a=1.0, flags=Flags.GATED | Flags.COUNTED), scan]], rows=5, width=20
    )
    wanted = made.copy()
    site_ref(*wanted.arguments())
    site_triton(*made.arguments())
    assert_same(made, wanted, exact=False)
    seeds = range(rounds(suite=1, nightly=3))
    scanned = sum(check_steps(scan_triton, seed, DTYPES[seed]) for seed in seeds)
    assert scanned > 60, scanned
    sys.stdout.write(f"{edited} rows edited, {check_without_a_gpu()} cases of attention\n")


if __name__ == "__main__":
    quicken()
    main()
