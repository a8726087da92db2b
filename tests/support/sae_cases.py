"""SAEs in a worker's memory, and inputs of the `site` op with programs that reconstruct."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from midstream import SAE, Reconstruct
from midstream.ops import layout
from midstream.ops.layout import Flags, Op
from midstream.ops.sae import layout as sae_layout
from midstream.ops.sae.reference import SaeBuffers
from midstream.plan import ModelShape
from midstream.plan.instructions import Instruction
from midstream.runtime.frontend.sae_registry import SaeRegistry
from midstream.runtime.frontend.weight_memory import WeightMemory
from midstream.sites import Tap
from support.site_cases import Case, Step, case

TAPS: tuple[Tap, ...] = (("resid_post", 1), ("mlp_in", 2), ("mlp_out", 2))


def stored(saes: Mapping[str, SAE], width: int) -> tuple[SaeRegistry, Tensor]:
    """SAEs as a front end registers them, and the memory of its workers, NaN where nothing is."""
    most = max(sae.num_features for sae in saes.values())
    numbers = sum(sae_layout.size(width, sae.num_features, True) for sae in saes.values())
    registry = SaeRegistry(
        WeightMemory(4 * numbers, lambda _: False, lambda: None),
        ModelShape(3, width, frozenset(TAPS)),
        {TAPS[0]: most, TAPS[1]: most},
    )
    memory = torch.full((numbers,), torch.nan)
    for name, sae in saes.items():
        with registry.adding(name, sae) as messages:
            for message in messages:
                data = torch.frombuffer(bytearray(message.data), dtype=torch.float32)
                memory[message.offset // 4 : message.offset // 4 + len(data)] = data
    return registry, memory


def random_sae(width: int, features: int, seed: int, **given: Any) -> SAE:
    """An SAE of random numbers, with thresholds if `jumps`, W_skip if `skips`."""
    draw = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw)

    jumps, skips = given.pop("jumps", False), given.pop("skips", False)
    return SAE(
        w_enc=random(width, features) / width**0.5,
        b_enc=0.3 * random(features),
        w_dec=random(features, width) / features**0.5,
        b_dec=random(width),
        threshold=torch.rand(features, generator=draw) if jumps else None,
        hook_name="blocks.2.mlp.hook_in" if given.get("is_transcoder") else None,
        w_skip=random(width, width) / width**0.5 if skips else None,
        **given,
    )


def random_saes(width: int, seed: int) -> dict[str, SAE]:
    """One of each form, of sizes that are no multiple of a tile."""
    return {
        "relu": random_sae(width, 37, seed, apply_b_dec_to_input=True),
        "jumps": random_sae(width, 150, seed + 1, jumps=True, centered=True),
        "top": random_sae(width, 140, seed + 2, top_k=9, normalize="layer_norm"),
        "rescaled": random_sae(width, 70, seed + 3, top_k=5, normalize="constant_norm_rescale"),
        "skips": random_sae(width, 33, seed + 4, jumps=True, skips=True, is_transcoder=True),
    }


CHANGES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "set": {"index": {3: 2.5, 32: 0.0, 7: -1.0}},
    "error": {"index": {3: 2.5, 32: 0.0, 7: -1.0}, "error": True},
    "scaled": {"index": dict.fromkeys(range(20), 0.5), "mode": "scale", "error": True},
    "added": {"index": [5, 1], "mode": "add", "value": 1.5},
    "ablated": {"index": [0, 2, 31], "mode": "ablate"},
}


def bound(registry: SaeRegistry, name: str, **asked: Any) -> Reconstruct:
    """The edit `Reconstruct(name, …)`, bound."""
    place = {} if registry.get(name).tap else {"layer": 1, "site": "resid_post"}
    (edit,) = Reconstruct(name, **asked, **place).bind(lambda of: registry.source(of.name))
    return edit


def described(edit: Reconstruct, width: int) -> Tensor:
    """The numbers of the CODE of an edit."""
    where = edit.reads_elsewhere(width)
    code = edit.instructions(width)[0] if where is None else where[1]
    assert code.op is Op.CODE
    assert code.read is not None
    return torch.from_numpy(code.read.numpy().copy())


def sae_case(
    *, rows: int, width: int, dtype: torch.dtype, residual: bool, seed: int, at_once: int
) -> Case:
    """Rows whose programs reconstruct with all of `random_saes`, in all of `CHANGES`, maybe behind
    a gate or with other edits after it, beside rows that do neither.
    """
    registry, memory = stored(random_saes(width, seed), width)
    steps: list[list[Step]] = [[], [Step(Op.ADD, write=1, a=0.5)]]
    bank: list[Tensor] = []
    places = 13  # of the bank of a case, in rows
    for nth, name in enumerate(registry.names):
        for kind, (change, asked) in enumerate(CHANGES.items()):
            if (nth + kind + seed) % 2:
                continue
            edit = bound(registry, name, **asked)
            numbers = described(edit, width).view(-1, width)
            flags = Flags.KEEP if change == "added" else Flags.NONE
            made = [
                Step(Op.CODE, read=places, flags=Flags.FRESH),
                _step(edit.instructions(width)[-1], flags),
            ]
            places += len(numbers)
            bank.append(numbers)
            if kind % 3 == 1:
                gate = Step(Op.GATE, read=2, flags=Flags.FRESH | Flags.STEP)
                gated = [Step(one.op, one.read, a=one.a, b=one.b, flags=one.flags | Flags.GATED)
                         for one in made]  # fmt: skip
                made = [gate, *gated]
            if kind % 3 == 2:
                made.append(Step(Op.SCALE, a=0.5))
            steps.append(made)
    found = case(
        steps, rows=rows, width=width, dtype=dtype, residual=residual, seed=seed, captures=False
    )
    found.bank = torch.cat((found.bank, *bank))
    found.tokens[rows // 2, layout.PROGRAM] = layout.IDLE_PROGRAM
    nan = torch.nan
    found.sae = SaeBuffers(
        memory, torch.full((rows + 3, width), nan), torch.full((at_once, 150), nan)
    )
    found.encodes = True
    return found


def _step(step: Instruction, flags: Flags) -> Step:
    return Step(step.op, a=step.a, b=step.b, flags=step.flags | flags | Flags.FRESH)


def assert_decoded(found: Case, wanted: Case) -> None:
    """The kernels decode what the reference decodes, of the rows that it decodes."""
    assert found.sae is not None
    assert wanted.sae is not None
    mine, theirs = found.sae.decoded.cpu(), wanted.sae.decoded
    coded = ~theirs.isnan().any(1)
    assert int(coded.sum()) > len(wanted.hidden) // 3
    assert torch.equal(mine.isnan().any(1), ~coded)
    error = (mine[coded] - theirs[coded]).norm(dim=1)
    assert float((error / theirs[coded].norm(dim=1).clamp(min=0.1)).max()) <= 1e-5
