"""The page: one HTML file that needs no network, made from the run's result alone."""

from __future__ import annotations

from midstream.lab.report.appendix import prompts_section, receipts_section, take_section
from midstream.lab.report.result import Result
from midstream.lab.report.sections import (
    answers_section,
    effect_section,
    layers_section,
    maps_section,
)
from midstream.lab.report.style import CSS
from midstream.viz.markup import data_block, escape, tag
from midstream.viz.picture import document

DATA_ID = "midstream-report"
"""Id of the element that contains the result as JSON."""

# Ids of the sections and their headings, in the order of the page.
SECTIONS = {
    "layers": ("Where the two classes part", layers_section),
    "tokens": ("Token by token, layer by layer", maps_section),
    "effect": ("What the strength does", effect_section),
    "answers": ("What it writes", answers_section),
    "take": ("Take the direction with you", take_section),
    "prompts": ("Texts and questions", prompts_section),
    "receipts": ("Receipts", receipts_section),
}


def render(result: Result) -> str:
    body = _header(result) + "\n".join(
        tag("section", tag("h2", escape(title)) + make(result), id=name)
        for name, (title, make) in SECTIONS.items()
    )
    data = data_block(DATA_ID, result.to_dict())
    return document(f"midstream: {result.model}", body, css=CSS, data=[data])


def _header(result: Result) -> str:
    positive, negative = result.classes
    title = f"From {negative} to {positive}: reading and steering {result.model}"
    lead = (
        f"The model read {len(result.pairs)} pairs of texts, one {positive} and one {negative}. The"
        " mean difference of its activations is a direction. Added back while the model answers"
        f" questions, after layer {result.layer}, it moves what is written."
    )
    facts = {
        "model": result.model,
        **result.settings,
        **result.versions,
        "made": result.started,
        "time": ", ".join(f"{stage} {took:.1f} s" for stage, took in result.seconds.items()),
    }
    listed = "".join(
        tag("div", tag("dt", escape(name)) + tag("dd", escape(value)))
        for name, value in facts.items()
    )
    links = "".join(
        tag("a", escape(title), href=f"#{name}") for name, (title, _) in SECTIONS.items()
    )
    contents = tag("nav", links, aria_label="Contents")
    return tag(
        "header",
        tag("h1", escape(title)) + tag("p", escape(lead), "lead") + contents + tag("dl", listed),
    )
