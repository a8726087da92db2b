"""Probe scores of one completion, by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from midstream.validation import no_attribute

if TYPE_CHECKING:
    from torch import Tensor

    from midstream.viz import Chart, Picture


class Probes(Mapping[str, "Tensor"]):
    """The scores of one completion's probes, by name.

    `probes["refusal"]` is float32 [rows], one score for each token that the probe selects, in the
    order of their positions.
    """

    def __init__(
        self,
        scores: Mapping[str, Tensor],
        positions: Mapping[str, Tensor],
        tokens: Tensor | Sequence[int],
    ) -> None:
        """Create from tensors.

        Args:
            scores: per name, float32 [rows].
            positions: per name, int64 [rows], ascending.
            tokens: ids of the computed tokens of the whole request, from position 0; int64 if they
                are a tensor.
        """
        self._scores = dict(scores)
        self._positions = dict(positions)
        self._given_tokens = tokens

    if not TYPE_CHECKING:  # for type checkers these are errors too

        def __getattr__(self, name: str) -> Any:
            names = self.__dict__.get("_scores", ())
            raise no_attribute(self, name, {probe: f'write probes["{probe}"]' for probe in names})

    def __getitem__(self, name: str) -> Tensor:
        """Return the scores of a probe, float32 [rows]."""
        if name not in self._scores:
            known = ", ".join(self._scores)
            raise KeyError(f"there is no probe {name!r}; there are {known}")
        return self._scores[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._scores)

    def __len__(self) -> int:
        return len(self._scores)

    def only(self, names: Sequence[str]) -> Probes:
        """Return the scores of some of the probes. Raises KeyError: there is no such probe."""
        return Probes(
            {name: self[name] for name in names},
            {name: self._positions[name] for name in names},
            self._given_tokens,
        )

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

    def rows_from(self, name: str, first: int) -> tuple[list[float], list[int], list[int]]:
        """Return the scores of a probe, their positions and their tokens, from its row `first` on.
        What is before is not read.

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

    def picture(self, tokenizer: Any = None, name: str | None = None) -> Picture:
        """Return the scores of one probe as a picture: the text, its tokens coloured by score.

        The text goes from the first scored token to the last; tokens between them that the probe
        does not select have no colour.

        Args:
            tokenizer: what decodes ids, such as `llm.get_tokenizer()`; None: ids are shown.
            name: the probe; None: the first.

        Raises:
            KeyError: there is no such probe.
            SpecError: the text has more than 20,000 tokens.
        """
        from midstream import viz

        name = next(iter(self), "") if name is None else name
        scores, scored = self[name].tolist(), self.positions_of(name).tolist()
        places = list(range(scored[0], scored[-1] + 1)) if scored else []
        of_place = dict(zip(scored, scores, strict=True))
        ids = [int(self._tokens[place]) for place in places]
        texts = [f" {token}" if tokenizer is None else tokenizer.decode([token]) for token in ids]
        values = [of_place.get(place, float("nan")) for place in places]
        return viz.tokens(texts, values, title=f"probe {name}", positions=places)

    def plot(self, ax: Any = None, tokenizer: Any = None) -> Any:
        """Draw the scores over the tokens, a line for each probe; see `Chart.plot`.

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
        for name, scores in self.items():
            of_place = dict(zip(self._positions[name].tolist(), scores.tolist(), strict=True))
            lines[name] = [of_place.get(place, float("nan")) for place in shown]
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

    def __repr__(self) -> str:
        return f"Probes({', '.join(f'{name}: {_shown(self[name])}' for name in self)})"


def _shown(scores: Tensor) -> str:
    """Return the number of a probe's scores and their range, as `7 scores, −0.3 to 1.2`."""
    count = len(scores)
    if not count:
        return "no scores"
    if count == 1:
        return f"{float(scores[0]):.3g}"
    return f"{count} scores, {float(scores.min()):.3g} to {float(scores.max()):.3g}"
