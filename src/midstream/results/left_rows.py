"""Rows of `Activations` that stay on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from midstream.console import format_ranges
from midstream.plan.vectors.device_row import DeviceRow, DeviceSource
from midstream.validation import at, read_int


class LeftRows:
    """What `Activations` have of rows on the device; `source`: what keeps them there."""

    source: DeviceSource | None = None

    def on_device(
        self, site: str, layer: int, positions: Sequence[int] | None = None
    ) -> tuple[DeviceRow, ...]:
        """Return the rows that `Capture(reduce="device")` left on the device, for `rows=` of a
        `Steer` or a `Replace` in a request to the same engine.

        Args:
            site, layer: of the rows.
            positions: of their tokens, in this order; None: all that were captured, ascending.

        Raises:
            KeyError: no rows of the site and layer, or of a position, were left there.
            SpecError: a position is no int, or its row is not finite.
        """
        rows: Any = self
        source = self.source
        tap = next((tap for tap in source.taps if tap == (site, layer)), None) if source else None
        if source is None or tap is None:
            raise KeyError(f'no rows of {site} at layer {layer} were captured with reduce="device"')
        norms = rows[tap].reshape(-1).tolist()
        known = dict(zip(rows.positions_of(*tap).tolist(), norms, strict=True))
        with at("positions"):
            chosen = list(known) if positions is None else [read_int(item) for item in positions]
        for position in chosen:
            if position not in known:
                raise KeyError(
                    f"no row of {site} at layer {layer} was captured at position {position}; "
                    f"there are {format_ranges(tuple(known))}"
                )
        return tuple(source.row(tap, position, known[position]) for position in chosen)
