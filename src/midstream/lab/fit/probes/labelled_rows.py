"""Rows of labelled texts, from an engine, from a store or from memory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from midstream.errors import SpecError
from midstream.lab.fit.folds import Indices, number
from midstream.lab.fit.probes.row_scores import reduce_rows
from midstream.lab.fit.prompts import CapturedClass
from midstream.lab.fit.samples import StoredSamples
from midstream.plan.probe_files.info import model_name
from midstream.plan.vectors.matrix import MAX_RANK
from midstream.results.arrays import to_numpy
from midstream.validation import is_int, kind, show

if TYPE_CHECKING:
    from midstream.store.selection import Selection


@dataclass(frozen=True)
class FittedModel:
    """The model that rows are of; see `ProbeInfo`."""

    name: str = ""
    width: int = 0
    num_layers: int = 0

    @staticmethod
    def of(llm: Any) -> FittedModel:
        """Return that of an engine."""
        shape = llm.info.shape
        return FittedModel(
            model_name(str(llm.model_config.model)), shape.hidden_size, shape.num_layers
        )


@dataclass(frozen=True)
class Labels:
    """The class of each text.

    Attributes:
        indices: int64 [texts], of `classes`.
        classes: the names; of two, the second is the positive one.
    """

    indices: Indices
    classes: tuple[str, ...]

    @staticmethod
    def read(values: Any, positive: Any = None) -> Labels:
        """Read bools, whole numbers, or names of classes; `positive` None: the last when sorted."""
        values = values.tolist() if hasattr(values, "tolist") else values
        if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Sequence):
            raise SpecError("labels", f"expected a list with a label per text, got {kind(values)}")
        are_names = bool(values) and isinstance(values[0], str)
        keys = [_read_label(index, value, are_names) for index, value in enumerate(values)]
        classes = sorted(set(keys), key=None if are_names else int)
        if not 2 <= len(classes) <= MAX_RANK:
            shown = ", ".join(map(show, classes[:4])) + (", …" if len(classes) > 4 else "")
            problem = f"expected 2 to {MAX_RANK} classes, got {len(classes)}: {shown}"
            raise SpecError("labels", problem)
        if positive is not None:
            last = positive if isinstance(positive, str) else str(int(positive))
            if len(classes) > 2:
                problem = f"there are {len(classes)} classes; fitted.of({last!r}) is of one"
                raise SpecError("positive", problem)
            if last not in classes:
                names = " and ".join(map(show, classes))
                raise SpecError("positive", f"expected one of {names}, got {show(last)}")
            classes = [*(name for name in classes if name != last), last]
        places = {name: index for index, name in enumerate(classes)}
        return Labels(np.array([places[key] for key in keys], np.int64), tuple(classes))

    def __len__(self) -> int:
        return len(self.indices)


def _read_label(index: int, value: Any, is_name: bool) -> str:
    if is_name and isinstance(value, str):
        return str(value)
    if not is_name and (isinstance(value, bool) or (is_int(value) and int(value) >= 0)):
        return str(int(value))
    wanted = (
        "the name of a class, as the first label is"
        if is_name
        else ("a bool, a whole number from 0, or names of classes")
    )
    got = show(int(value)) if is_int(value) else kind(value)
    raise SpecError(f"labels[{index}]", f"expected {wanted}, got {got}")


def least_groups(labels: Indices, groups: Indices) -> int:
    """Return the number of groups of the class that has the fewest."""
    return min(len(np.unique(groups[labels == label])) for label in np.unique(labels))


@dataclass(frozen=True, eq=False)
class LabelledRows:
    """Rows of labelled texts at one site.

    Attributes:
        rows: [n, layers · width], of any float dtype.
        owners: int64 [n], the text of each row: ascending from 0, without a gap.
        labels: of the texts.
        groups: int64 [texts]: texts of one group are held out together.
        layers: the layers whose vectors are joined in a row.
        site: the site.
        digest: SHA-256 of texts, or of rows, and of labels, in hex.
        model: the model.
    """

    rows: NDArray[Any]
    owners: Indices
    labels: Labels
    groups: Indices
    layers: tuple[int, ...]
    site: Any
    digest: str
    model: FittedModel = FittedModel()

    def of(self, texts: Indices) -> LabelledRows:
        """Return the rows of some texts, int64 ascending, which are numbered anew."""
        kept = np.isin(self.owners, texts)
        return replace(
            self,
            rows=self.rows[kept],
            owners=np.searchsorted(texts, self.owners[kept]),
            labels=Labels(self.labels.indices[texts], self.labels.classes),
            groups=self.groups[texts],
        )

    @property
    def row_labels(self) -> Indices:
        """The class of each row, int64 [n]."""
        return self.labels.indices[self.owners]


def read_groups(groups: Any, count: int) -> Indices:
    """Read a key per text; None: each text is a group."""
    if groups is None:
        return np.arange(count)
    if isinstance(groups, (str, bytes)) or not hasattr(groups, "__len__"):
        raise SpecError("groups", f"expected a list with a key per text, got {kind(groups)}")
    if len(groups) != count:
        raise SpecError("groups", f"expected {count} keys, one for each text, got {len(groups)}")
    try:
        return number(groups, {})
    except TypeError:
        raise SpecError("groups", "expected keys that can be hashed, such as texts") from None


def joined(captured: CapturedClass) -> NDArray[Any]:
    """Return captured rows with the vectors of all layers one after the other."""
    return np.concatenate(list(captured.rows.values()), axis=1)


def captured_rows(
    llm: Any, outputs: Sequence[Any], captured: CapturedClass, labels: Labels, groups: Indices
) -> LabelledRows:
    """Return the rows of captured texts; each has at least one."""
    missing = set(range(len(labels))) - set(captured.owners.tolist())
    if missing:
        raise SpecError("positions", f"nothing is selected in the text {min(missing)}")
    digest = _digest([output.prompt_token_ids for output in outputs], labels)
    layers = tuple(captured.rows)
    site = outputs[0].activations.sites[0]
    return LabelledRows(
        joined(captured), captured.owners, labels, groups, layers, site, digest, FittedModel.of(llm)
    )


def rows_in_memory(
    rows: Any, labels: Labels, layers: Sequence[int], owners: Any, groups: Any
) -> LabelledRows:
    """Read rows [n, width] or [n, layers, width]; `owners` None: each row is a text."""
    array = to_numpy(rows.detach().cpu() if hasattr(rows, "detach") else np.asarray(rows))
    if array.ndim not in (2, 3) or array.dtype.kind not in "fiu" or not array.size:
        shape = f"{array.dtype} {list(array.shape)}"
        raise SpecError("rows", f"expected real numbers [n, width] or [n, layers, width]; {shape}")
    if not np.isfinite(array).all():
        raise SpecError("rows", "has numbers that are not finite")
    if array.ndim == 3 and array.shape[1] != len(layers) or array.ndim == 2 and len(layers) != 1:
        raise SpecError("layer", f"{len(layers)} layers for rows of shape {list(array.shape)}")
    keys = np.arange(len(array)) if owners is None else np.asarray(owners)
    if keys.ndim != 1 or keys.dtype.kind not in "iu" or len(keys) != len(array):
        raise SpecError("owners", f"expected {len(array)} integers, the text of each row")
    wanted = np.unique(keys)
    if len(wanted) != len(labels) or wanted[0] != 0 or wanted[-1] != len(labels) - 1:
        problem = f"expected rows of the texts 0 to {len(labels) - 1}, which have labels"
        raise SpecError("labels" if owners is None else "owners", problem)
    order = np.argsort(keys, kind="stable")
    flat = array.reshape(len(array), -1)[order]
    return LabelledRows(
        flat, keys[order].astype(np.int64), labels, read_groups(groups, len(labels)),
        tuple(layers), "resid_post", _digest(flat, labels),
    )  # fmt: skip


def stored_rows(
    selection: Selection, labels: Any, positive: Any, groups: Any, reduce: str
) -> LabelledRows:
    """Read the rows of a selection of one site: each request is a text.

    Args:
        labels: "tag", a dict by request, or a function of a request's id.
        groups: a function of a request's id; None: each request is a group.
        reduce: see `reduce_rows`.
    """
    from midstream.store.selection import as_selection

    samples = StoredSamples(as_selection(selection), "selection")
    numbers: dict[str, int] = {}
    owners = number(samples.requests(), numbers)
    order = np.argsort(owners, kind="stable")
    blocks = [
        np.concatenate([block.astype(np.float32) for block in samples.blocks(layer)])[order]
        for layer in samples.layers
    ]
    kept, texts = reduce_rows(np.concatenate(blocks, axis=1), owners[order], reduce)
    of_request = _label_of(samples, labels)
    known = Labels.read([of_request(request) for request in numbers], positive)
    if groups is not None and not callable(groups):
        raise SpecError("groups", f"expected a function of a request's id, got {kind(groups)}")
    keys = None if groups is None else [groups(request) for request in numbers]
    headers = [segment.shard.header for segment in samples.selection.segments]
    models = {FittedModel(model_name(header.model), header.hidden_size) for header in headers}
    if len(models) > 1:
        names = ", ".join(sorted(model.name for model in models))
        raise SpecError("selection", f"expected rows of one model, got {names}; select by `model`")
    return LabelledRows(
        kept, texts, known, read_groups(keys, len(numbers)), samples.layers, samples.site,
        _digest(kept, known), models.pop(),
    )  # fmt: skip


def _label_of(samples: StoredSamples, labels: Any) -> Callable[[str], Any]:
    """Return the function of a request's id that is its label."""
    if isinstance(labels, str) and labels == "tag":
        first = samples.starts[samples.layers[0]]
        batch = samples.selection.take(np.arange(first, first + len(samples)))
        tags = dict(zip(batch.request, batch.tag, strict=True))
        return tags.__getitem__
    if callable(labels):
        function: Callable[[str], Any] = labels
        return function
    if not isinstance(labels, Mapping):
        problem = f'expected "tag", a dict by request, or a function, got {kind(labels)}'
        raise SpecError("labels", problem)

    def look_up(request: str) -> Any:
        if request not in labels:
            raise SpecError("labels", f"there is none for the request {show(request)}")
        return labels[request]

    return look_up


def _digest(content: Any, labels: Labels) -> str:
    """Return the hash of token ids, or of rows as float32, and of the labels."""
    digest = hashlib.sha256(json.dumps([labels.classes, labels.indices.tolist()]).encode())
    if isinstance(content, np.ndarray):
        digest.update(np.ascontiguousarray(content, "<f4").tobytes())
    else:
        digest.update(json.dumps([list(map(int, ids)) for ids in content]).encode())
    return digest.hexdigest()
