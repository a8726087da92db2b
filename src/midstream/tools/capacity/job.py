"""Planned capture job: model, taps, number of tokens, and the machines it runs on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from midstream.errors import SpecError
from midstream.sites import ENDS, Tap
from midstream.spec.capture import GATHERED, RETURNS
from midstream.spec.resolve.tap_lookup import find_taps
from midstream.spec.selection import Layers, Sites
from midstream.spec.shape import ModelShape
from midstream.tools.capacity.shape import ModelSize
from midstream.validation import at, is_int, listed, show

STEP_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class Fleet:
    """Machines and the layout of engines on them.

    Attributes:
        tp: tensor-parallel size, GPUs per layer.
        pp: number of pipeline stages.
        engines: number of replicas.
        gpus_per_node: GPUs of one machine.
        nodes: number of machines.
    """

    tp: int
    pp: int
    engines: int
    gpus_per_node: int
    nodes: int

    @staticmethod
    def of(tp: int, pp: int, gpus_per_node: int, nodes: int | None, dp: int | None) -> Fleet:
        """Create a fleet from a number of machines, of engines, or of both.

        Args:
            tp: tensor-parallel size.
            pp: number of pipeline stages.
            gpus_per_node: GPUs of one machine.
            nodes: number of machines; None: as few as `dp` engines need.
            dp: number of engines; None: as many as `nodes` machines hold, or 1 without `nodes`.

        Raises:
            SpecError: a number is invalid or the engines do not fit the machines. The path is the
                name of the field.
        """
        for name, value in {"tp": tp, "pp": pp, "gpus_per_node": gpus_per_node}.items():
            _at_least_one(name, value)
        if tp > gpus_per_node:
            raise SpecError(
                "tp",
                f"expected at most {gpus_per_node}, the GPUs of a machine, got {tp}: otherwise "
                "every layer waits for the network; use pp for more GPUs",
            )
        if gpus_per_node % tp:
            raise SpecError(
                "tp", f"expected a divisor of {gpus_per_node}, the GPUs of a machine, got {tp}"
            )
        one = tp * pp
        if nodes is None:
            engines = _at_least_one("dp", 1 if dp is None else dp)
            return Fleet(tp, pp, engines, gpus_per_node, -(-engines * one // gpus_per_node))
        gpus = _at_least_one("nodes", nodes) * gpus_per_node
        if dp is None:
            if gpus % one:
                raise SpecError(
                    "nodes",
                    f"{nodes} machines have {gpus} GPUs, which is not a multiple of an engine's "
                    f"tp · pp = {one}; set the number of engines with dp",
                )
            dp = gpus // one
        if _at_least_one("dp", dp) * one > gpus:
            raise SpecError(
                "dp",
                f"expected at most {gpus // one}, got {dp}: {dp} engines need {dp * one} GPUs, "
                f"and there are {gpus}",
            )
        return Fleet(tp, pp, dp, gpus_per_node, nodes)

    @property
    def gpus(self) -> int:
        """GPUs of one engine."""
        return self.tp * self.pp

    @property
    def engines_of_a_node(self) -> int:
        """Largest number of engines whose front ends share one machine."""
        return min(self.engines, max(1, self.gpus_per_node // self.gpus))

    @property
    def spans_nodes(self) -> bool:
        """Whether one engine needs more than one machine."""
        return self.gpus > self.gpus_per_node


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """A planned capture job.

    Attributes:
        size: size of the model.
        taps: captured taps, (site, layer), in the order of the forward pass.
        tokens: total number of tokens computed.
        request_tokens: tokens of one request.
        fraction: fraction of the tokens whose rows are kept.
        step_tokens: tokens of a full step (vLLM's `max_num_batched_tokens`).
        fleet: machines and engines.
    """

    size: ModelSize
    taps: tuple[Tap, ...]
    tokens: int
    request_tokens: int
    fraction: float
    step_tokens: int
    fleet: Fleet

    @staticmethod
    def of(
        size: ModelSize,
        layers: object,
        sites: object,
        tokens: int,
        fleet: Fleet,
        *,
        request_tokens: int = 512,
        fraction: float = 1.0,
        step_tokens: int = STEP_TOKENS,
    ) -> PlannedJob:
        """Create a job. `layers` and `sites` are parsed as in `Capture`.

        Raises:
            SpecError: a field is invalid; the path is its name.
        """
        for name, value in {
            "tokens": tokens,
            "request_tokens": request_tokens,
            "step_tokens": step_tokens,
        }.items():
            _at_least_one(name, value)
        if not 0 < fraction <= 1:
            raise SpecError("fraction", f"expected a number above 0 and at most 1, got {fraction}")
        if fleet.pp > size.num_layers:
            raise SpecError(
                "pp", f"expected at most {size.num_layers}, the model's layers, got {fleet.pp}"
            )
        with at("sites"):
            names = Sites.parse(sites)
        with at("layers"):
            chosen = Layers.parse(layers)
        reasons = size.inner.reasons
        every = [(site, layer) for site in names.names for layer in range(size.num_layers)]
        tapped = [tap for tap in every if tap not in reasons and _is_place(tap, size.num_layers)]
        shape = ModelShape(size.num_layers, size.hidden_size, tapped, reasons)
        taps = find_taps(chosen, names, shape, "layers", "sites")
        return PlannedJob(size, taps, tokens, request_tokens, fraction, step_tokens, fleet)

    def taps_of_stages(self) -> list[list[Tap]]:
        """Return the taps of each pipeline stage."""
        bounds = stages(self.size.num_layers, self.fleet.pp)
        return [[tap for tap in self.taps if tap[1] in part] for part in bounds]


def _is_place(tap: Tap, num_layers: int) -> bool:
    """Return whether a tap is a site of its layer, or one at the end of the model where that is."""
    site, layer = tap
    return layer == ENDS.get(site, layer) % num_layers


def stages(layers: int, pp: int) -> list[range]:
    """Return the layers of each pipeline stage, divided as vLLM does: remaining layers go to the
    stages before the last, starting from the end.
    """
    sizes = [layers // pp] * pp
    for behind in range(2, layers % pp + 2):
        sizes[-behind] += 1
    bounds = [sum(sizes[:stage]) for stage in range(pp + 1)]
    return [range(*pair) for pair in zip(bounds, bounds[1:], strict=False)]


def ranks(size: ModelSize, taps: Sequence[Tap], tp: int, returned: str) -> list[list[int]]:
    """Return the widths of the rows, or parts of rows, that each rank of a stage transfers.

    Of vectors that each rank has: gathered, the first rank transfers all rows; sharded, each rank
    those of every tp-th tap. Of heads and neurons each rank transfers its part.
    """
    found: list[list[int]] = [[] for _ in range(tp)]
    whole = 0
    for tap in taps:
        width, parts = size.width(tap), size.parts(tap, tp)
        if parts > 1:
            for rank in range(0, tp, tp // parts):
                found[rank].append(width // parts)
            continue
        found[0 if returned == GATHERED else whole % tp].append(width)
        whole += 1
    return found


def read_return(text: str, tp: int) -> tuple[str, ...]:
    """Parse the option `--return` into layouts; an empty text means both, or one with tp 1.

    Raises:
        SpecError: the layout is unknown.
    """
    if not text:
        return RETURNS if tp > 1 else (GATHERED,)
    if text not in RETURNS:
        raise SpecError("return", f"expected {listed(RETURNS)}; got {show(text)}")
    return (text,)


def _at_least_one(name: str, value: int) -> int:
    if not is_int(value) or value < 1:
        raise SpecError(name, f"expected an integer of at least 1, got {value!r}")
    return int(value)
