"""Reading from a forward's source which sub-modules it calls, and with what."""

import ast
import textwrap

import pytest

from midstream.errors import UnsupportedError
from midstream.runtime.models.forward_flow import Flow, Names, OutputPart, Trace, Value, read

KINDS = {"qkv": "matrix", "attn": "matrix", "out": "matrix", "norm": "module", "rope": "module"}


def flow(body: str, **decided: bool) -> Flow:
    """The flow of a forward; conditions by name are known, others are not."""
    text = "def forward(self, x, positions):\n" + textwrap.indent(textwrap.dedent(body), "    ")
    function = ast.parse(text).body[0]
    assert isinstance(function, ast.FunctionDef)
    return read(function, Names(KINDS.get, lambda test: decided.get(ast.unparse(test))))


def given(body: str, path: str = "attn", **decided: bool) -> list[Value | None]:
    """The positional arguments of the only call of a module."""
    (call,) = flow(body, **decided).of(path)
    return list(call.args)


def piece(index: int, *sizes: str, through: tuple[str, ...] = ()) -> Value:
    part = OutputPart("qkv", index, sizes)
    return Value(frozenset({Trace(part, bool(through), frozenset(through))}))


SPLIT = "qkv, _ = self.qkv(x)\nq, k, v = qkv.split([self.a, self.b, self.b], dim=-1)\n"
SIZES = ("self.a", "self.b", "self.b")


def test_a_module_that_is_given_vectors_by_name_returns_them_in_that_order() -> None:
    body = SPLIT + "q, k = self.rope(positions, q.float(), k)\nself.attn(q, k, v)"
    q, k, v = given(body)
    assert (q, k) == (piece(0, *SIZES, through=("rope",)), piece(1, *SIZES, through=("rope",)))
    assert v == piece(2, *SIZES)


def test_views_change_no_number_and_norms_do() -> None:
    body = SPLIT + "q = self.norm(q.view(-1, 2, 8)).view(q.shape)\nk = k.reshape(-1, 8)\n"
    q, k, _ = given(body + "self.attn(q, k, v)")
    assert q == piece(0, *SIZES, through=("norm",))
    assert k == piece(1, *SIZES)


def test_equal_pieces_are_counted() -> None:
    q, *_ = given("y = self.qkv(x)[0]\nq, k, v = y.chunk(chunks=3, dim=-1)\nself.attn(q, k, v)")
    assert q == Value(frozenset({Trace(OutputPart("qkv", 0, 3))}))


@pytest.mark.parametrize(
    "split",
    [
        "q, k, v = qkv.split([self.a, self.b, self.b], dim=0)",
        "q, k, v = qkv.split([self.a, self.b, self.b])",
        "q, k, v = qkv.split(self.a, dim=-1)",
        "q, k, v = self.split(qkv)",
        "q, k, v = (qkv[:, :4], qkv[:, 4:6], qkv[:, 6:])",
        "q, k, v = qkv.view(-1, 3, 8).unbind(1)",
    ],
)
def test_another_split_leaves_a_mark(split: str) -> None:
    for value in given(f"qkv, _ = self.qkv(x)\n{split}\nself.attn(q, k, v)"):
        assert value is not None
        whole = all(part.index is None for part in value.parts)
        assert whole
        assert any(name.endswith("()") for name in value.through)


@pytest.mark.parametrize(
    "change", ["q = q.transpose(0, 1)", "q = f(q)", "q = q @ self.w", "g(q)", "q[0] = k"]
)
def test_what_the_reader_does_not_know_leaves_a_mark(change: str) -> None:
    q, *_ = given(SPLIT + change + "\nself.attn(q, k, v)")
    assert q is not None
    assert any(name.endswith("()") for name in q.through)


def test_both_branches_of_an_unknown_condition_count() -> None:
    q, *_ = given(SPLIT + "if positions.any():\n    q = self.norm(q)\nself.attn(q, k, v)")
    assert q == piece(0, *SIZES).joined(piece(0, *SIZES, through=("norm",)))


def test_only_one_branch_of_a_known_condition_counts() -> None:
    body = SPLIT + "if self.a:\n    q = f(q)\n    self.attn(q, k, v)\nelse:\n    self.attn(q, k, v)"
    assert given(body, **{"self.a": False})[0] == piece(0, *SIZES)
    assert len(flow(body).of("attn")) == 2


def test_nothing_after_a_return_counts() -> None:
    body = "if self.a:\n    return self.out(x)\nreturn self.attn(x, x, x)"
    assert [call.path for call in flow(body, **{"self.a": True}).calls] == ["out"]
    assert [call.path for call in flow(body).calls] == ["out", "attn"]


def test_histories_of_the_parts_of_a_sum_are_kept_apart() -> None:
    body = "o = self.attn(x, x, x)\ng = f(self.qkv(x)[0])\nself.out(o * torch.sigmoid(g))"
    (value,) = given(body, "out")
    assert value is not None
    assert value.of("attn").through == frozenset()
    assert value.of("qkv").through == {"f()", "sigmoid()"}


@pytest.mark.parametrize(
    "use", ["F.linear(x, self.qkv.weight)", "self.qkv.forward(x)", "fused(self.qkv, x)"]
)
def test_a_matrix_that_is_used_without_a_call_is_bypassed(use: str) -> None:
    found = flow(f"y = {use}")
    assert found.bypassed == {"qkv"}
    assert not found.of("qkv")


@pytest.mark.parametrize(
    "body", ["for i in x:\n    pass", "while x:\n    pass", "[f(y) for y in x]"]
)
def test_a_loop_cannot_be_read(body: str) -> None:
    with pytest.raises(UnsupportedError, match="its forward has a"):
        flow(body)
