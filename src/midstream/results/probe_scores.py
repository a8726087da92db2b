"""Probe scores of one completion, by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from midstream.errors import SpecError
from midstream.validation import listed, no_attribute

if TYPE_CHECKING:
    from torch import Tensor

    from midstream.viz import Chart, Picture


class Probes(Mapping[str, "Tensor"]):
    """The scores of one completion's probes, by name.

    `probes["refusal"]` is float32 [rows], one score for each token that the probe selects, in the
    order of their positions. Of a probe with classes it is float32 [rows, classes].
    """

    def __init__(
        self,
        scores: Mapping[str, Tensor],
        positions: Mapping[str, Tensor],
        tokens: Tensor | Sequence[int],
        outputs: Mapping[str, Sequence[str]] = MappingProxyType({}),
    ) -> None:
        """Create from tensors.

        Args:
            scores: per name, float32 [rows], or [rows, classes].
            positions: per name, int64 [rows], ascending.
            tokens: ids of the computed tokens of the whole request, from position 0; int64 if they
                are a tensor.
            outputs: per name, the names of the classes of [rows, classes], if they have names.
        """
        self._scores = dict(scores)
        self._outputs = {name: tuple(classes) for name, classes in outputs.items()}
        self._positions = dict(positions)
        self._given_tokens = tokens

    if not TYPE_CHECKING:  # for type checkers these are errors too

        def __getattr__(self, name: str) -> Any:
            names = self.__dict__.get("_scores", ())
            raise no_attribute(self, name, {probe: f'write probes["{probe}"]' for probe in names})

    def __getitem__(self, name: str) -> Tensor:
        """Return the scores of a probe, float32 [rows], or [rows, classes]."""
        if name not in self._scores:
            known = ", ".join(self._scores)
            raise KeyError(f"there is no probe {name!r}; there are {known}")
        return self._scores[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._scores)

    def __len__(self) -> int:
        return len(self._scores)

    def positions_of(self, name: str) -> Tensor:
        """Return the positions of a probe's scores in the request, prompt first, int64 [rows].

        Raises:
            KeyError: there is no such probe.
        """
        self[name]
        return self._positions[name]

    def token_ids_of(self, name: str) -> Tensor:
        """Return the tokens that a probe scored, int64 [rows].

        Raises:
            KeyError: there is no such probe.
        """
        return self._tokens[self.positions_of(name)]

    def outputs_of(self, name: str) -> tuple[str, ...]:
        """Return the names of a probe's classes; without names, their indices as text. Empty: the
        score is one number.

        Raises:
            KeyError: there is no such probe.
        """
        scores = self[name]
        if len(scores.shape) < 2:
            return ()
        return self._outputs.get(name) or tuple(map(str, range(scores.shape[1])))

    def rows_from(self, name: str, first: int) -> tuple[list[Any], list[int], list[int]]:
        """Return the scores of a probe, their positions and their tokens, from its row `first` on.
        Of several classes, a score is a list. What is before is not read.

        Raises:
            KeyError: there is no such probe.
        """
        scores = self[name].numpy()[first:]
        positions = self._positions[name].numpy()[first:].tolist()
        token_ids = self._given_tokens
        if isinstance(token_ids, Sequence):
            tokens = [token_ids[position] for position in positions]
        else:
            tokens = token_ids.numpy()[positions].tolist()
        return scores.tolist(), positions, tokens

    @property
    def _tokens(self) -> Tensor:
        if isinstance(self._given_tokens, Sequence):
            from midstream.results.arrays import array_of  # it needs NumPy

            self._given_tokens = array_of(self._given_tokens, "int64")
        return self._given_tokens

    def picture(
        self, tokenizer: Any = None, name: str | None = None, output: str | int | None = None
    ) -> Picture:
        """Return the scores of one probe as a picture: the text, its tokens coloured by score.

        The text goes from the first scored token to the last; tokens between them that the probe
        does not select have no colour.

        Args:
            tokenizer: what decodes ids, such as `llm.get_tokenizer()`; None: ids are shown.
            name: the probe; None: the first.
            output: the name or index of its class; None: it has one.

        Raises:
            KeyError: there is no such probe.
            SpecError: the text has more than 20,000 tokens, or the probe has no such class.
        """
        from midstream import viz

        name = next(iter(self), "") if name is None else name
        scored = self.positions_of(name).tolist()
        scores = self._output(name, output).tolist()
        places = list(range(scored[0], scored[-1] + 1)) if scored else []
        of_place = dict(zip(scored, scores, strict=True))
        ids = [int(self._tokens[place]) for place in places]
        texts = [f" {token}" if tokenizer is None else tokenizer.decode([token]) for token in ids]
        values = [of_place.get(place, float("nan")) for place in places]
        return viz.tokens(texts, values, title=f"probe {name}", positions=places)

    def plot(self, ax: Any = None, tokenizer: Any = None) -> Any:
        """Draw the scores over the tokens, a line for each probe and class; see `Chart.plot`.

        Args:
            ax: as for `Chart.plot`.
            tokenizer: what decodes ids, for labels; None: positions are shown.
        """
        return self._chart(tokenizer).plot(ax)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Any:
        if not any(map(len, self._positions.values())):
            return {"text/plain": repr(self)}
        return self._chart(None)._repr_mimebundle_()

    def _chart(self, tokenizer: Any) -> Chart:
        from midstream import viz

        shown = sorted({place for places in self._positions.values() for place in places.tolist()})
        lines = {}
        for name in self:
            scored = self._positions[name].tolist()
            for output in self.outputs_of(name) or (None,):
                scores = self._output(name, output).tolist()
                of_place = dict(zip(scored, scores, strict=True))
                line = name if output is None else f"{name}: {output}"
                lines[line] = [of_place.get(place, float("nan")) for place in shown]
        texts = (
            [tokenizer.decode([int(self._tokens[place])]) for place in shown] if tokenizer else None
        )
        return viz.curve(
            shown,
            lines,
            title="probe scores",
            x_title="token" if texts else "position",
            y_title="score" if len(lines) > 1 else f"score of {next(iter(lines))}",
            labels=texts,
        )

    def _output(self, name: str, output: str | int | None) -> Tensor:
        """Return the scores of one class of a probe, float32 [rows]."""
        scores, known = self[name], self.outputs_of(name)
        if not known and output is None:
            return scores
        index = known.index(output) if output in known else output
        if not isinstance(index, int) or not 0 <= index < len(known):
            shown = f"it has {listed(known[:8])}" if known else "it has one score for each token"
            raise SpecError("output", f"the probe {name!r} has no class {output!r}; {shown}")
        return scores[:, index]

    def __repr__(self) -> str:
        return f"Probes({', '.join(f'{name}: {_shown(self[name])}' for name in self)})"


def _shown(scores: Tensor) -> str:
    """Return the number of a probe's scores and their range, as `7 scores, −0.3 to 1.2`."""
    count = len(scores)
    if not count:
        return "no scores"
    if len(scores.shape) > 1:
        shown = f"{count} scores of {scores.shape[1]} classes"
        return f"{shown}, {float(scores.min()):.3g} to {float(scores.max()):.3g}"
    if count == 1:
        return f"{float(scores[0]):.3g}"
    return f"{count} scores, {float(scores.min()):.3g} to {float(scores.max()):.3g}"
