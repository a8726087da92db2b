"""Fingerprints of inference: the largest values of `final_norm` at generated tokens, which show
whether a model computed them. The method is TOPLOC's (Ong et al. 2025, arXiv 2501.16007), with
indices and values as they are in place of a polynomial.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from midstream.errors import NothingSelectedError, SpecError
from midstream.plan import Capture
from midstream.results.activations import Activations
from midstream.validation import at, kind, read_count, read_fields, show

if TYPE_CHECKING:
    from torch import Tensor

    from midstream.api.llm import LLM

    Ints = np.ndarray[Any, np.dtype[np.int64]]

SITE: Literal["final_norm"] = "final_norm"
# Of every generated token: the first one was computed from the prompt's last row.
CAPTURE = Capture(sites=SITE, positions=["last_prompt", "generated"])
BATCH, TOP = 32, 128


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest errors of an honest fingerprint, over 128 values.

    Attributes:
        exponents: values whose sign or exponent differs, or that are not among the largest.
        mean, median: of the differences of the other mantissas, in units of the last place.
    """

    exponents: int
    mean: float
    median: float


# By dtype: bits of the mantissa, and the limits; those of bfloat16 are the paper's.
LIMITS = {
    "bfloat16": (7, Limits(38, 10, 8)),
    "float32": (23, Limits(8, 256, 128)),
}


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The largest values of the rows that generated tokens were computed from.

    Attributes:
        dtype: of the model, "bfloat16" or "float32".
        tokens: number of generated tokens.
        sha256: of all token ids, the prompt's and the generated ones.
        indices, values: of each 32 rows, as one vector, the 128 largest by absolute value: index
            and bits.
    """

    dtype: str
    tokens: int
    sha256: str
    indices: tuple[tuple[int, ...], ...]
    values: tuple[tuple[int, ...], ...]

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {name: getattr(self, name) for name in self.__slots__}

    @staticmethod
    def parse(value: object) -> Fingerprint:
        """Read one from the form of `to_dict`.

        Raises:
            SpecError: it is malformed.
        """
        fields: Any = read_fields(value, required=Fingerprint.__slots__, optional=())
        if fields["dtype"] not in LIMITS:
            raise SpecError("dtype", f"expected {' or '.join(LIMITS)}, got {show(fields['dtype'])}")
        with at("tokens"):
            batches = -(-read_count(fields["tokens"], 1) // BATCH)
        pairs = []
        for name in ("indices", "values"):
            with at(name):
                if not isinstance(fields[name], (list, tuple)) or len(fields[name]) != batches:
                    raise SpecError("", f"expected a list of {batches} lists")
                pairs.append(tuple(_numbers(part) for part in fields[name]))
        if [*map(len, pairs[0])] != [*map(len, pairs[1])] or not all(map(len, pairs[0])):
            raise SpecError("values", "expected one for each index")
        return Fingerprint(fields["dtype"], fields["tokens"], str(fields["sha256"]), *pairs)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a fingerprint is that of the tokens and the model, and the errors of each 32 tokens.

    Attributes:
        reason: why not; empty: it is.
        exponents: of each 32 tokens, how many of 128 values differ in sign, exponent or place.
        mean, median: of the other mantissas, in units of the last place; infinite: there are none.
    """

    reason: str
    exponents: tuple[float, ...] = ()
    mean: tuple[float, ...] = ()
    median: tuple[float, ...] = ()

    @property
    def passed(self) -> bool:
        return not self.reason


def fingerprint(output: Any) -> Fingerprint:
    """Return the fingerprint of an output of `llm.generate(…, capture=CAPTURE)`.

    Raises:
        SpecError: the model's dtype is neither bfloat16 nor float32.
        NothingSelectedError: the output has not got a row for each generated token.
    """
    tokens = list(output.outputs[0].token_ids)
    rows = _rows(output.activations, len(output.prompt_token_ids) - 1, len(tokens))
    dtype = str(rows.dtype).removeprefix("torch.")
    if dtype not in LIMITS:
        raise SpecError("dtype", f"expected {' or '.join(LIMITS)}, got {dtype}")
    batches = [_largest(_bits(batch)) for batch in rows.split(BATCH)]
    return Fingerprint(
        dtype,
        len(tokens),
        _digest([*output.prompt_token_ids, *tokens]),
        tuple(tuple(indices.tolist()) for indices, _ in batches),
        tuple(tuple(values.tolist()) for _, values in batches),
    )


def verify(
    llm: LLM, prompt: Sequence[int], tokens: Sequence[int], proof: Fingerprint, **asked: Any
) -> Verdict:
    """Compute all tokens in one prefill, and compare its rows with a fingerprint.

    Whoever makes the fingerprint can make the digest too: keep what was sent with the tokens. With
    another digest a few altered tokens of 32 are within the limits, and the last token is in no
    row. That tokens were drawn as the parameters say is not verified.

    Args:
        llm: an engine of the model and dtype that was claimed, which taps `final_norm`.
        prompt, tokens: ids of the prompt's and of the generated tokens.
        proof: their fingerprint.
        **asked: the edits of the request, as for `LLM.generate`.

    Raises:
        SpecError: there are no tokens, or the engine has another dtype than the fingerprint.
    """
    from midstream import SamplingParams

    if not prompt or not tokens:
        raise SpecError("tokens" if prompt else "prompt", "expected at least one token")
    if llm.info.dtype != proof.dtype:
        raise SpecError(
            "proof.dtype", f"expected that of the engine, {llm.info.dtype}, got {proof.dtype}"
        )
    if proof.tokens != len(tokens) or proof.sha256 != _digest([*prompt, *tokens]):
        return Verdict("it is of other tokens")
    first = len(prompt) - 1
    (output,) = llm.generate(
        [{"prompt_token_ids": [*prompt, *tokens[:-1]]}],
        SamplingParams(temperature=0, max_tokens=1, ignore_eos=True),
        capture=Capture(sites=SITE, positions=slice(first, first + len(tokens))),
        use_tqdm=False,
        **asked,
    )
    rows = _rows(output.activations, first, len(tokens))
    return judge(rows, proof)


def judge(rows: Tensor, proof: Fingerprint) -> Verdict:
    """Compare rows with a fingerprint.

    Args:
        rows: [tokens, width] in the fingerprint's dtype: `final_norm` from the prompt's last token
            to the last generated one but one.
        proof: the fingerprint.
    """
    mantissa, limits = LIMITS[proof.dtype]
    errors = []
    for number, batch in enumerate(rows.split(BATCH)):
        bits = _bits(batch)
        indices, _ = _largest(bits)
        claimed = dict(zip(proof.indices[number], proof.values[number], strict=True))
        shared = [index for index in indices.tolist() if index in claimed]
        here, there = bits[shared], np.array([claimed[index] for index in shared], np.int64)
        alike = here >> mantissa == there >> mantissa
        gaps = np.abs(here - there)[alike]
        count = len(indices)
        missing = (count - int(alike.sum())) * TOP / count
        if len(gaps):
            errors.append((missing, float(gaps.mean()), float(np.median(gaps))))
        else:
            errors.append((missing, float("inf"), float("inf")))
    exponents, mean, median = (tuple(part) for part in zip(*errors, strict=True))
    for what, largest, most in (
        ("exponents that differ", max(exponents), limits.exponents),
        ("mean difference of mantissas", max(mean), limits.mean),
        ("median difference of mantissas", max(median), limits.median),
    ):
        if largest > most:
            reason = f"{what}: {largest:.3g}, and at most {most} of an honest one"
            return Verdict(reason, exponents, mean, median)
    return Verdict("", exponents, mean, median)


def _rows(activations: Activations, first: int, count: int) -> Tensor:
    """Return the rows of `count` tokens, [count, width], from position `first` on."""
    if SITE not in activations:
        raise NothingSelectedError("capture", f"expected {SITE} of each generated token: CAPTURE")
    wanted = range(first, first + count)
    index = {place: row for row, place in enumerate(activations.positions_of(SITE).tolist())}
    if not all(place in index for place in wanted):
        raise NothingSelectedError(
            "capture.positions", 'expected ["last_prompt", "generated"], as CAPTURE has them'
        )
    return activations[SITE][[index[place] for place in wanted]]


def _bits(rows: Tensor) -> Ints:
    """Return all values as one vector of their bits, int64 [rows · width]."""
    import torch

    bits = rows.contiguous().view(torch.int16 if rows.element_size() == 2 else torch.int32)
    unsigned = bits.flatten().long() & (0xFFFF if rows.element_size() == 2 else 0xFFFFFFFF)
    return unsigned.numpy()


def _largest(bits: Ints) -> tuple[Ints, Ints]:
    """Return indices and bits of the largest values; without its sign a float's bits order it."""
    sign = 1 << (15 if bits.max(initial=0) <= 0xFFFF else 31)
    order = np.argsort(-(bits & (sign - 1)), kind="stable")[:TOP]
    return order, bits[order]


def _digest(tokens: Sequence[int]) -> str:
    return hashlib.sha256(np.asarray(tokens, "<i8").tobytes()).hexdigest()


def _numbers(value: object) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)) or len(value) > TOP:
        raise SpecError("", f"expected lists of at most {TOP} numbers, got {kind(value)}")
    numbers = tuple(read_count(number, 0) for number in value)
    if max(numbers, default=0) >= 1 << 32:
        raise SpecError("", f"expected numbers below 2**32, got {show(max(numbers))}")
    return numbers
