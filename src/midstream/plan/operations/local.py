"""`Local`: an edit by a Python function, where the engine is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from midstream.ops.layout import Op
from midstream.plan.forms import LayersLike, PhaseLike, PositionsLike, SitesLike
from midstream.plan.instructions import Instruction
from midstream.plan.local_functions import LocalFunction, function_of
from midstream.plan.operation import Operation, one_edit
from midstream.plan.operations.gate import Gate
from midstream.plan.operations.plain import PlainEdit
from midstream.validation import at


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Local(Operation):
    """Replace the selected tokens' vectors by what a Python function makes of them: h ← fn(h).

    The engine calls `fn(h, info)` in each step, at each selected site and layer, with the rows of
    this request alone: h is [rows, width] in the model's dtype, a copy; `info` is a
    `midstream.results.local_info.LocalInfo`. It returns the new rows, of the same shape and dtype,
    or None to leave them unchanged. It runs before all other edits at the same site and layer,
    which read what it returned, as captures and probes there do.

    Only for engines with the setting `hooks="local"`, from Python, and never over HTTP. Where
    workers are other processes, they import the function by its module and name.

    Attributes:
        function: the function.
    """

    op = "local"

    function: LocalFunction

    def __init__(
        self,
        fn: Callable[..., Any],
        layer: LayersLike | None = None,
        site: SitesLike | None = None,
        positions: PositionsLike = "all",
        phase: PhaseLike | None = None,
        exclude: PositionsLike | None = None,
    ) -> None:
        """Create an edit.

        Args:
            fn: the function. It must give the same for the same tokens: requests with the same
                function share KV of equal prefixes, for whose tokens it is not called again.
            layer, site, positions, phase, exclude: see Steer; positions by token id only where the
                ids are those of the prompt.

        Raises:
            SpecError: a field is malformed; its path starts with the field's name.
        """
        with at("fn"):
            self._set(function=function_of(fn))
        self._set_place(layer, site, positions, phase, exclude)

    def own(self) -> dict[str, Any]:
        return {"fn": self.function}

    def instructions(self, width: int) -> tuple[Instruction, ...]:
        # Changes no bit: the device counts the tokens at which the function is to be called.
        return one_edit([Instruction(Op.SCALE, a=1.0)])


Edit = PlainEdit | Gate | Local
