"""Rows of `Activations` that stay on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from midstream.plan.vectors.device_row import DeviceRow, DeviceSource


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
        """
        tap = site, layer
        rows: Any = self
        if self.source is None or tap not in self.source.taps:
            raise KeyError(f'no rows of {site} at layer {layer} were captured with reduce="device"')
        norms = rows[tap].reshape(-1).tolist()
        known = dict(zip(rows.positions_of(*tap).tolist(), norms, strict=True))
        chosen = known if positions is None else positions
        return tuple(self.source.row(tap, position, known[position]) for position in chosen)
