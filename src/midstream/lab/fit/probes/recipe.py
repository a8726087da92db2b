"""`Recipe`: how labelled texts become a probe, from what is captured to what is held out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from midstream.errors import SpecError
from midstream.lab.fit.folds import Indices
from midstream.lab.fit.probes.estimators import Estimator
from midstream.lab.fit.probes.held_out import read_held_out
from midstream.lab.fit.probes.labelled_rows import (
    LabelledRows,
    Labels,
    captured_rows,
    joined,
    read_groups,
)
from midstream.lab.fit.probes.row_scores import POOLS, REDUCTIONS, reduce_rows
from midstream.lab.fit.prompts import naming_fields, read_prompts, rows_of_outputs, run_prompts
from midstream.lab.fit.samples import read_layers
from midstream.plan.positions.positions import Positions
from midstream.plan.probe import Probe
from midstream.plan.probe_files.info import ProbeInfo
from midstream.plan.readouts.capture import Capture
from midstream.plan.scores.pools import MOST_TOKENS, NO_POOL
from midstream.plan.selection import read_site
from midstream.results.arrays import to_numpy
from midstream.validation import at, kind, read_count, read_word
from midstream.version import __version__


@dataclass(frozen=True)
class Recipe:
    """How labelled texts become a probe; see `FittedProbe.fit`.

    Attributes:
        estimator: what fits the rows.
        reduce, pool, held_out, seed, site, name: as they were given.
        layers: the layers, as they were given.
        positions: of the tokens; None: of rows from a store or from memory, whose are not known.
    """

    estimator: Estimator
    reduce: str
    pool: str
    held_out: int | float
    seed: int
    layers: tuple[int, ...] = ()
    site: Any = "resid_post"
    positions: Positions | None = None
    name: str = "probe"

    @staticmethod
    def read(kind: object, reduce: object, pool: object, held_out: object, seed: object) -> Recipe:
        with at("kind"):
            estimator = Estimator.read(kind)
        with at("reduce"):
            reduction = read_word(reduce, REDUCTIONS)
        reads_texts = estimator.reads_texts
        with at("pool"):
            known = ("last",) if reads_texts else POOLS
            text_pool = known[0] if pool is None else read_word(pool, known)
        if reads_texts and reduction:
            problem = f"an attention probe weighs the rows of a text itself; omit {reduction!r}"
            raise SpecError("reduce", problem)
        with at("seed"):
            number = read_count(seed, least=0)
        return Recipe(estimator, reduction, text_pool, read_held_out(held_out), number)

    def at(self, layer: Any, site: Any, positions: Any, name: str) -> Recipe:
        """Return the recipe for rows of a place."""
        if layer is None:
            raise SpecError("layer", "missing: give the layer that the probe reads, or several")
        with at("site"):
            where = read_site(site)
        layers = tuple(read_layers(layer))
        if not layers or len(set(layers)) < len(layers):
            raise SpecError("layer", f"expected a layer, or distinct layers, got {list(layers)}")
        selection = None if positions is None else Positions.within(positions, None, None)
        return replace(self, layers=layers, site=where, positions=selection, name=name)

    def to_capture(self) -> Capture:
        """Return what the engine is asked for: means are computed there."""
        reduce = "mean" if self.reduce == "mean" else ""
        return Capture(list(self.layers), self.site, self.positions or "all", reduce=reduce)

    def check_texts(self, llm: Any, texts: Any, labels: Labels) -> list[Any]:
        """Check the engine, and that there is a label for each text; return the texts."""
        if not hasattr(llm, "generate"):
            name = f"; write LLM({llm!r})" if isinstance(llm, str) else ""
            raise SpecError("llm", f"expected an LLM, got {kind(llm)}{name}")
        read = read_prompts("texts", texts)
        if len(labels) != len(read):
            raise SpecError("labels", f"{len(labels)} for {len(read)} texts; give one each")
        return read

    def capture(self, llm: Any, texts: Any, labels: Labels) -> Sequence[Any]:
        """Run the texts in one batch, and return the outputs."""
        read = self.check_texts(llm, texts, labels)
        with naming_fields("layer"):
            return run_prompts(llm, read, self.to_capture(), "texts")

    def rows_of(
        self, llm: Any, outputs: Sequence[Any], labels: Labels, groups: Any
    ) -> LabelledRows:
        """Return the rows of the outputs, reduced."""
        captured = rows_of_outputs(outputs, self.site)
        keys = read_groups(groups, len(labels))
        return self.reduced(captured_rows(llm, outputs, captured, labels, keys))

    def reduced(self, data: LabelledRows) -> LabelledRows:
        rows, owners = reduce_rows(data.rows, data.owners, self.reduce)
        return replace(data, rows=rows, owners=owners, site=self.site)

    def read_rows(self, llm: Any, texts: Any, width: int) -> tuple[NDArray[Any], Indices]:
        """Return the rows of new texts, reduced, and the text of each; see `decision_function`."""
        if hasattr(texts, "shape"):
            rows = to_numpy(texts.detach().cpu() if hasattr(texts, "detach") else texts)
            arrays = [row[None] for row in rows.reshape(len(rows), -1)]
        elif isinstance(texts, (list, tuple)) and texts and hasattr(texts[0], "shape"):
            hosted = [part.detach().cpu() if hasattr(part, "detach") else part for part in texts]
            arrays = [to_numpy(part).reshape(len(part), -1) for part in hosted]
        else:
            if llm is None:
                raise SpecError("texts", "the probe was not fitted on an LLM: give rows")
            read = read_prompts("texts", texts)
            with naming_fields("layer"):
                outputs = run_prompts(llm, read, self.to_capture(), "texts")
            captured = rows_of_outputs(outputs, self.site)
            wide = joined(captured)
            arrays = [wide[captured.owners == index] for index in range(len(read))]
        for index, array in enumerate(arrays):
            if array.shape[1] != width or not len(array):
                shape = list(array.shape)
                raise SpecError(f"texts[{index}]", f"expected rows of {width} numbers, got {shape}")
        owners = np.repeat(range(len(arrays)), [len(array) for array in arrays])
        return reduce_rows(np.concatenate(arrays), owners, self.reduce)

    def placed(self, probe: Probe, data: LabelledRows) -> Probe:
        """Return a fitted probe with name, positions, and the pool by which its score at the last
        token of a text is that of the text; of means of rows there is none but of a direction.
        """
        pool = {"mean": f"mean:{MOST_TOKENS}", "max": "max", "last": NO_POOL}[self.pool]
        if self.reduce == "mean":
            pool = f"mean:{MOST_TOKENS}" if probe.direction is not None else NO_POOL
        elif len(data.rows) == len(data.labels):
            pool = NO_POOL
        return probe.replace(name=self.name, positions=self.positions or "all", pool=pool)

    def info_of(
        self, data: LabelledRows, chosen: dict[str, Any], scores: dict[str, float]
    ) -> ProbeInfo:
        """Return what is known of the probe that is fitted to rows."""
        from sklearn import __version__ as version

        steps = {
            "kind": self.estimator.name,
            **chosen,
            "positions": None if self.positions is None else json.dumps(self.positions.to_dict()),
            "reduce": self.reduce,
            "pool": self.pool,
            "held_out": self.held_out,
            "seed": self.seed,
            "texts": len(data.labels),
            "rows": len(data.rows),
            "midstream": __version__,
            "scikit-learn": version,
        }
        model = data.model
        return ProbeInfo(
            model.name, model.width, model.num_layers, steps, self.estimator.scaler,
            data_hash=data.digest, scores=scores, classes=data.labels.classes,
        )  # fmt: skip
