"""What is planned: which rows of how many tokens, and on what they are computed."""

from __future__ import annotations

from dataclasses import dataclass

from midstream.errors import SpecError
from midstream.sites import Tap
from midstream.spec.capture import GATHERED, RETURNS
from midstream.spec.resolve.tap_lookup import find_taps
from midstream.spec.selection import Layers, Sites
from midstream.spec.shape import ModelShape
from midstream.tools.capacity.shape import ModelSize
from midstream.validation import at, is_int, listed, show

STEP_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class Fleet:
    """The machines, and how engines lie on them.

    Attributes:
        tp: GPUs that share each layer.
        pp: pipeline stages.
        engines: replicas.
        gpus_per_node: of one machine.
        nodes: machines.
    """

    tp: int
    pp: int
    engines: int
    gpus_per_node: int
    nodes: int

    @staticmethod
    def of(tp: int, pp: int, gpus_per_node: int, nodes: int | None, dp: int | None) -> Fleet:
        """A fleet of as many machines, or of as many engines, or of both; of one engine where
        neither is said.

        Raises:
            SpecError: it does not come out even. The path is the field that is wrong.
        """
        for name, value in {"tp": tp, "pp": pp, "gpus_per_node": gpus_per_node}.items():
            _at_least_one(name, value)
        if tp > gpus_per_node:
            raise SpecError(
                "tp",
                f"expected at most the {gpus_per_node} GPUs of a machine, got {tp}: each layer "
                "would wait for the network; use pp for more",
            )
        if gpus_per_node % tp:
            raise SpecError(
                "tp", f"expected a divisor of the {gpus_per_node} GPUs of a machine, got {tp}"
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
                    f"{nodes} machines have {gpus} GPUs, which do not come out even in engines of "
                    f"tp · pp = {one}; say with dp how many engines there are",
                )
            dp = gpus // one
        if _at_least_one("dp", dp) * one > gpus:
            raise SpecError(
                "dp",
                f"{dp} engines take {dp * one} GPUs, and there are {gpus}; at most {gpus // one}",
            )
        return Fleet(tp, pp, dp, gpus_per_node, nodes)

    @property
    def gpus(self) -> int:
        """GPUs of one engine."""
        return self.tp * self.pp

    @property
    def engines_of_a_node(self) -> int:
        """How many engines have their front end on the machine that has most of them."""
        return min(self.engines, max(1, self.gpus_per_node // self.gpus))

    @property
    def spans_nodes(self) -> bool:
        """Whether an engine is larger than a machine."""
        return self.gpus > self.gpus_per_node


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """A capture that is planned.

    Attributes:
        size: the model.
        taps: what is captured: (site, layer), in the order in which a forward reaches them.
        tokens: how many are computed, all told.
        request_tokens: tokens of one request.
        fraction: of the tokens, the share whose rows are kept.
        step_tokens: tokens of a full step (vLLM's `max_num_batched_tokens`).
        fleet: on what.
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
        """Reads layers and sites as `Capture` does.

        Raises:
            SpecError: a field is wrong; the path is its name.
        """
        for name, value in {
            "tokens": tokens,
            "request_tokens": request_tokens,
            "step_tokens": step_tokens,
        }.items():
            _at_least_one(name, value)
        if not 0 < fraction <= 1:
            raise SpecError("fraction", f"expected a share above 0 and up to 1, got {fraction}")
        if fleet.pp > size.num_layers:
            raise SpecError(
                "pp", f"expected at most the {size.num_layers} layers of the model, got {fleet.pp}"
            )
        with at("sites"):
            names = Sites.parse(sites)
        with at("layers"):
            chosen = Layers.parse(layers)
        every = [(site, layer) for site in names.names for layer in range(size.num_layers)]
        shape = ModelShape(size.num_layers, size.hidden_size, every)
        taps = find_taps(chosen, names, shape, "layers", "sites")
        return PlannedJob(size, taps, tokens, request_tokens, fraction, step_tokens, fleet)

    def taps_of_stages(self) -> list[int]:
        """How many taps each pipeline stage has."""
        bounds = stages(self.size.num_layers, self.fleet.pp)
        return [sum(layer in part for _, layer in self.taps) for part in bounds]


def stages(layers: int, pp: int) -> list[range]:
    """The layers of each pipeline stage, as vLLM shares them out: what does not come out even goes
    to stages before the last, from behind.
    """
    sizes = [layers // pp] * pp
    for behind in range(2, layers % pp + 2):
        sizes[-behind] += 1
    bounds = [sum(sizes[:stage]) for stage in range(pp + 1)]
    return [range(*pair) for pair in zip(bounds, bounds[1:], strict=False)]


def ranks(taps: int, tp: int, returned: str) -> list[int]:
    """How many of a stage's taps each of its ranks moves: all of them the first, or each every
    tp-th.
    """
    if returned == GATHERED:
        return [taps] + [0] * (tp - 1)
    return [len(range(rank, taps, tp)) for rank in range(tp)]


def read_return(text: str, tp: int) -> tuple[str, ...]:
    """The layouts that are meant; empty: both, where there are two.

    Raises:
        SpecError: no such layout.
    """
    if not text:
        return RETURNS if tp > 1 else (GATHERED,)
    if text not in RETURNS:
        raise SpecError("return", f"expected {listed(RETURNS)}; got {show(text)}")
    return (text,)


def _at_least_one(name: str, value: int) -> int:
    if not is_int(value) or value < 1:
        raise SpecError(name, f"expected a whole number from 1, got {value!r}")
    return int(value)
