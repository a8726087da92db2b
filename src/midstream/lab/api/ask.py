"""Questions about captured rows: the prompts and edits that put rows of one request at the
placeholder tokens of another.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from midstream.errors import ReceiptError, SpecError
from midstream.plan import Replace, Steer
from midstream.plan.captured_rows import CapturedRows, is_captured, no_rows
from midstream.plan.heads import read_ordered_indices
from midstream.plan.positions.prompt import Prompt
from midstream.plan.selection import read_site
from midstream.plan.vectors.matrix import read_rows
from midstream.plan.vectors.vector import Vector
from midstream.sites import Tap
from midstream.validation import MAX_ITEMS, at, check_text, kind, read_int, read_word, show

# Of the activation oracles of Karvonen et al. 2025, whose adapters were trained with them.
TEMPLATE, PLACEHOLDER, INTO = "Layer: {layer}\n{rows} \n{question}", " ?", 1
# Tokens of an answer.
MOST_TOKENS = 64
ADD: Literal["add"] = "add"
REPLACE: Literal["replace"] = "replace"
MATCH: Literal["match"] = "match"
_FIELDS = ("{layer}", "{rows}", "{question}")
# Arguments of `ask` by the fields of the edit that is made of them.
_ARGUMENTS = {"rows": "sources", "vector": "sources", "layer": "into", "site": "into"}
_SHOWN = 8


@dataclass(frozen=True)
class AskRequest:
    """Questions about rows; for the fields see `LLM.ask`, which has their defaults."""

    sources: Any
    question: Any
    layer: Any
    site: Any = "resid_post"
    positions: Any = None
    into: Any = INTO
    mode: Any = ADD
    norm: Any = MATCH
    template: Any = TEMPLATE
    placeholder: Any = PLACEHOLDER

    def __post_init__(self) -> None:
        """Check what needs neither a model nor rows. Raises SpecError."""
        for name in ("layer", "into"):
            with at(name):
                if read_int(getattr(self, name)) < 0:
                    raise SpecError("", f"expected a layer from 0 on, got {getattr(self, name)}")
        with at("site"):
            object.__setattr__(self, "site", read_site(self.site))
        if self.positions is not None:
            positions = read_ordered_indices(self.positions, "positions")
            object.__setattr__(self, "positions", positions)
        with at("mode"):
            read_word(self.mode, (ADD, REPLACE))
        if self.norm is not None:
            with at("norm"):
                read_word(self.norm, (MATCH,))
        for name in ("template", "placeholder"):
            text = getattr(self, name)
            if not isinstance(text, str):
                raise SpecError(name, f"expected a text, got {kind(text)}")
            with at(name):
                check_text(text)
        if not self.placeholder.strip():
            raise SpecError("placeholder", "expected a text with other characters than whitespace")
        for name in _FIELDS[1:]:
            if self.template.count(name) != 1:
                raise SpecError("template", f"expected {name} in it once")

    @property
    def tap(self) -> Tap:
        """The site and layer that the rows are from."""
        return self.site, self.layer

    def pairs(self) -> list[tuple[Any, str]]:
        """Return the rows of each source (see `rows_of`) with its question; one source or question
        is for all of the others.
        """
        sources = _several(self.sources)
        questions = _several(self.question)
        for name, values in (("sources", sources), ("question", questions)):
            if not values:
                raise SpecError(name, "expected at least one, got none")
        for index, question in enumerate(questions):
            if not isinstance(question, str) or not question:
                name = "question" if question is self.question else f"question[{index}]"
                raise SpecError(name, f"expected a text, got {question!r:.60}")
        count = max(len(sources), len(questions))
        if {len(sources), len(questions)} - {1, count}:
            raise SpecError(
                "question",
                f"{len(questions)} for {len(sources)} sources; give one, or one for each source",
            )
        rows = [self._rows_of(source, index) for index, source in enumerate(sources)]
        if len(rows) == 1:
            rows *= count
        return list(zip(rows, questions * (count // len(questions)), strict=True))

    def _rows_of(self, source: Any, index: int) -> tuple[Vector, ...] | CapturedRows:
        try:
            return self.rows_of(source)
        except SpecError as error:
            if source is self.sources:
                raise
            raise type(error)(error.path, f"{error.problem} (of sources[{index}])") from None

    def rows_of(self, source: Any) -> tuple[Vector, ...] | CapturedRows:
        """Return the rows of a source; or the reference to those of a server."""
        captured = getattr(source, "captured", None)
        only: Any = getattr(source, "outputs", ())
        if captured is None and len(only) == 1:
            captured = getattr(only[0], "captured", None)
        if is_captured(source) or captured is not None:
            with at("sources"):
                return self._by_handle(CapturedRows.parse(captured or source))
        if len(only) > 1:
            raise SpecError(
                "sources", f"this output has {len(only)} completions; give one of its outputs"
            )
        if hasattr(source, "__array__") and not hasattr(source, "positions_of"):
            return self._by_value(source)
        activations = source if hasattr(source, "positions_of") else _activations_of(source)
        if self.tap not in activations:
            raise no_rows(self.tap, activations.keys())
        rows = activations[self.tap]
        source = getattr(activations, "source", None)
        is_on_device = source is not None and self.tap in source.taps
        if self.positions is None:
            return activations.on_device(*self.tap) if is_on_device else self._checked(rows)
        known = {p: row for row, p in enumerate(activations.positions_of(*self.tap).tolist())}
        for position in self.positions:
            if position not in known:
                has = ", ".join([*map(str, list(known)[:_SHOWN]), *(["…"] if known else [])])
                raise SpecError(
                    "positions",
                    f"no row of {self.site} at layer {self.layer} was captured at position "
                    f"{position}; there are {has}",
                )
        if is_on_device:
            return tuple(activations.on_device(*self.tap, self.positions))
        return self._checked(rows[[known[position] for position in self.positions]])

    def _by_handle(self, rows: CapturedRows) -> CapturedRows:
        if self.positions is not None and rows.positions:
            raise SpecError("positions", "given as an argument too; give them in one place")
        for name in ("layer", "site"):
            own = getattr(rows, name)
            if own not in (None, getattr(self, name)):
                raise SpecError(name, f"{own!r}, and the argument is {getattr(self, name)!r}")
        positions = self.positions or rows.positions or None
        return CapturedRows(rows.id, positions, self.layer, self.site)

    def _by_value(self, rows: Any) -> tuple[Vector, ...]:
        if self.positions is not None:
            raise SpecError("positions", "rows by value have no positions; give those rows alone")
        return self._checked(rows[None] if len(rows.shape) == 1 else rows)

    def _checked(self, rows: Any) -> tuple[Vector, ...]:
        if len(rows.shape) != 2:
            raise SpecError("sources", f"expected rows [rows, width], got shape {list(rows.shape)}")
        with at("sources"):
            return read_rows(rows, MAX_ITEMS)

    def content(self, count: int, question: str) -> str:
        """Return the user's message about so many rows."""
        run = self.placeholders(count)
        text = str(self.template).replace("{layer}", str(self.layer))
        # The question last: it may have braces of its own.
        before, _, after = text.partition("{question}")
        text = before.replace("{rows}", run) + question + after.replace("{rows}", run)
        if text.find(run) != text.rfind(run):
            raise SpecError(
                "placeholder",
                f"{show(run)} is in the message twice, so it is not clear which tokens get the "
                "rows; choose another placeholder",
            )
        return text

    def placeholders(self, count: int) -> str:
        return str(self.placeholder * count)

    def locate(self, prompt: Prompt, count: int) -> list[int]:
        """Return the positions of the placeholders in the tokens of a prompt, one for each row."""
        run = self.placeholders(count)
        spelt = prompt.text_map
        assert spelt is not None, "the prompt was made from text"
        start = spelt.text.find(run)
        if start < 0 or start != spelt.text.rfind(run):
            many = "not" if start < 0 else "more than once"
            raise SpecError(
                "placeholder",
                f"{show(run)} is {many} in the prompt that the chat template makes; choose another",
            )
        first, stop = spelt.tokens(start, start + len(run))
        if stop - first != count:
            raise SpecError(
                "placeholder",
                f"{count} of {show(self.placeholder)} are {stop - first} tokens of this model, and "
                f"there are {count} rows; choose a placeholder that is one token",
            )
        return list(range(first, stop))

    def edit(self, rows: tuple[Vector, ...] | CapturedRows, positions: Any) -> Steer | Replace:
        """Return the edit that puts rows at positions, in their order."""
        place: dict[str, Any] = {"layer": self.into, "positions": positions}
        with naming_arguments():
            if self.mode == ADD:
                return Steer(rows=rows, norm=self.norm, **place)
            return Replace(rows, norm="keep" if self.norm == MATCH else None, **place)


def check_placed(output: Any, count: int) -> Any:
    """Return an answer, after checking by its receipt that each row had one token."""
    for completion in output.outputs:
        edits = [part for part in completion.receipt.selected if part.what.startswith("edits")]
        tokens = sum(stop - start for part in edits[:1] for start, stop in part.positions)
        if tokens != count:
            raise ReceiptError(
                f"{count} rows were placed at {tokens} tokens: the placeholder is in the prompt "
                "more than once, or is no single token; choose another placeholder"
            )
    return output


@contextmanager
def naming_arguments() -> Iterator[None]:
    """Raise errors of the edit as errors of the arguments of `ask` that it was made of."""
    try:
        yield
    except SpecError as error:
        parts = error.path.replace("[", ".[").split(".")
        names = [part for part in parts if part and not part.startswith("[") and part != "edits"]
        if not error.path.startswith(("edits", *_ARGUMENTS)):
            raise
        name = _ARGUMENTS.get(names[0], names[0]) if names else "sources"
        raise type(error)(name, error.problem) from None


def _several(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _activations_of(source: Any) -> Any:
    activations = getattr(source, "activations", None)
    if activations is None:
        has = "it has no activations" if hasattr(source, "outputs") else f"got {kind(source)}"
        raise SpecError(
            "sources",
            "expected an output with captured rows, its activations, or rows [rows, width], "
            f"{has}; capture them: generate(…, capture=Capture(…))",
        )
    return activations
