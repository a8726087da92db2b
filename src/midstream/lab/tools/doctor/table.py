"""Terminal output of the doctor: tables of sites and operations, and a one-line verdict."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from midstream.console import format_ranges
from midstream.lab.tools.doctor.environment import Environment
from midstream.lab.tools.doctor.report import (
    INCOMPARABLE,
    OK,
    REFUSED,
    UNBUILT,
    UNCOMPARED,
    WRONG,
    OperationFound,
    Report,
    SiteFound,
)
from midstream.sites import NAMES

_STYLES = {OK: "green", WRONG: "bold red", "lacking": "dim", UNCOMPARED: "yellow"}
_VERDICTS = {
    REFUSED: "not supported",
    UNBUILT: "cannot be built here",
    UNCOMPARED: "not compared",
    INCOMPARABLE: "not comparable",
    WRONG: "wrong",
}


def render(report: Report) -> RenderableType:
    """Return the whole report."""
    parts: list[RenderableType] = [Text(_title(report), style="bold")]
    if report.sites:
        parts.append(_sites(report.sites))
    if report.operations:
        parts.append(_operations(report.operations))
    parts.append(verdict(report))
    return Group(*parts)


def render_environment(environment: Environment) -> RenderableType:
    """Return versions, devices, extras, seams and problems."""
    rows = Table(box=None, show_header=False, pad_edge=False)
    for name, version in environment.versions.items():
        if version is not None:
            rows.add_row(Text(name), Text(version))
    rows.add_row("devices", Text(", ".join(environment.devices) or "CPU"))
    rows.add_row("model runner", environment.runner or "unknown")
    complete = [name for name, missing in environment.extras.items() if not missing]
    rows.add_row("extras", Text(", ".join(complete) or "none"))
    for name, missing in environment.extras.items():
        if missing:
            rows.add_row(Text(f"without {name}"), Text(f"lacks {', '.join(missing)}"))
    if environment.seams is None:
        rows.add_row("seams", "not checked: no vLLM")
    else:
        rows.add_row("seams", Text("\n".join(environment.seams) or "as expected"))
    lines = [Text(f"problem: {problem}", style="yellow") for problem in environment.problems]
    return Group(rows, *(lines or [Text("no problems found", style="green")]))


def verdict(report: Report) -> Text:
    """Return the one-line verdict."""
    if report.outcome != OK:
        style = _STYLES.get(report.outcome, "yellow")
        return Text(f"{_VERDICTS[report.outcome]}: {report.reason}", style=style)
    compared = sum(site.outcome == OK for site in report.sites)
    skipped = sum(site.outcome == UNCOMPARED for site in report.sites)
    lacking = sum(site.outcome == "lacking" for site in report.sites)
    text = (
        f"ok: {compared} taps and {len(report.operations)} operations match "
        f"{report.compared_with}; largest relative error {report.worst:.1e}"
    )
    if report.images:
        text += f"; also with {report.images} in the prompt"
    if lacking:
        text += f"; {lacking} do not exist in this model"
    if skipped:
        text += f"; {skipped} could not be compared"
    if report.reason:
        text += f". {report.reason}"
    return Text(text, style=_STYLES[OK])


def _title(report: Report) -> str:
    architecture = f", {report.architecture}" if report.architecture else ""
    return f"{report.model}{architecture}: {report.copy}"


def _sites(sites: Iterable[SiteFound]) -> Table:
    table = Table("site", "layers", "result", "largest error", "reason")
    for name in NAMES:
        alike: dict[tuple[str, str], list[SiteFound]] = {}
        for finding in sites:
            if finding.site == name:
                alike.setdefault((finding.outcome, finding.reason), []).append(finding)
        for (outcome, reason), group in alike.items():
            errors = [member.error for member in group if member.error is not None]
            table.add_row(
                name,
                format_ranges([member.layer for member in group]),
                Text(outcome, style=_STYLES[outcome]),
                f"{max(errors):.1e}" if errors else "",
                reason,
            )
    return table


def _operations(operations: Iterable[OperationFound]) -> Table:
    table = Table("operation", "at", "result", "largest error", "reason")
    for operation in operations:
        table.add_row(
            operation.name,
            f"{operation.site} of layer {operation.layer}",
            Text(operation.outcome, style=_STYLES[operation.outcome]),
            "" if operation.error is None else f"{operation.error:.1e}",
            operation.reason,
        )
    return table
