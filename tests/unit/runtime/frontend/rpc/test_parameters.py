"""Parameters that are read in parts from several ranks."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from midstream.errors import BusyError, FetchError, SpecError
from midstream.runtime.frontend.rpc import parameters
from midstream.runtime.frontend.rpc.fetch import carry_out
from midstream.runtime.protocol.rpc import ParameterRows, ReadParameter

NAME = "lm_head.weight"


def part_of(whole: torch.Tensor, begin: int, stop: int) -> Any:
    """A rank that has rows [begin, stop)."""

    def answer(request: ReadParameter) -> ParameterRows:
        first = max(request.first, begin)
        rows = whole[first : min(request.first + request.count, stop)]
        return ParameterRows(
            shape=list(whole.shape),
            dtype=str(whole.dtype).removeprefix("torch."),
            first=first,
            data=rows.contiguous().view(torch.uint8).numpy().tobytes() if len(rows) else b"",
        )

    return answer


def absent(request: ReadParameter) -> ParameterRows:
    """A rank of a stage without the parameter."""
    return ParameterRows(names=["model.embed_tokens.weight"])


def read(*ranks: Any) -> torch.Tensor:
    return carry_out(parameters.read_parameter(NAME), lambda request: [r(request) for r in ranks])


@given(st.data())
def test_a_parameter_is_put_together_from_any_split_over_ranks_and_parts(data):
    rows, width = data.draw(st.integers(1, 40)), data.draw(st.sampled_from([(), (3,), (2, 2)]))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    whole = torch.randn(rows, *width).to(dtype)
    cuts = sorted(data.draw(st.lists(st.integers(0, rows), max_size=3)))
    bounds = zip([0, *cuts], [*cuts, rows], strict=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parameters, "READ_BYTES", data.draw(st.integers(1, 200)))
        found = read(absent, *(part_of(whole, *each) for each in bounds))
    assert found.dtype == dtype
    assert torch.equal(found, whole)


def test_rows_that_no_rank_has_are_an_error_that_names_the_first():
    whole = torch.randn(10, 2)
    with pytest.raises(FetchError, match=r"no worker has row 4 of lm_head.weight"):
        read(part_of(whole, 0, 4), part_of(whole, 6, 10))


def test_an_unknown_name_is_rejected_with_the_names_that_there_are():
    with pytest.raises(SpecError, match=r"'lm_head.weight' outside.*model.embed_tokens.weight"):
        read(absent, absent)


def test_a_parameter_that_cannot_be_read_whole_is_rejected_with_the_reason():
    def quantised(request: ReadParameter) -> ParameterRows:
        return ParameterRows(shape=[0, 4], dtype="int8", problem="it is quantised, as int8")

    with pytest.raises(SpecError, match=r"lm_head.weight cannot be read: it is quantised"):
        read(quantised)


def test_a_sleeping_engine_gives_no_parameter():
    parameters.check_awake(False)
    with pytest.raises(BusyError, match="wake it up"):
        parameters.check_awake(True)
