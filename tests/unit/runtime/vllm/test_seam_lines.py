"""Seams as lines of text: what is written is what is read, and nothing else is read."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.runtime.vllm import seam_lines
from midstream.runtime.vllm.seam_lines import Fields, Seam, SeamGroup

NAMES = st.text("aZ_09", min_size=1, max_size=5).filter(str.isidentifier)
PATHS = st.lists(NAMES, min_size=1, max_size=3).map(".".join)
REASONS = st.text(" #(a}~", min_size=1, max_size=9).filter(lambda text: text == text.strip())
RELEASES = st.tuples(st.integers(0, 3), st.integers(0, 40))


@st.composite
def functions(draw: st.DrawFn) -> Seam:
    arguments = draw(st.lists(NAMES, unique=True, max_size=5))
    by_name = draw(st.integers(0, len(arguments)))
    name = draw(st.lists(NAMES, min_size=1, max_size=2))
    holder = draw(st.none() | st.just("") | PATHS)
    return Seam(
        draw(PATHS),
        ".".join(name),
        tuple(arguments[:by_name]),
        draw(REASONS),
        tuple(arguments[by_name:]),
        "" if holder is None else f"{holder}.{name[-1]}".lstrip("."),
        draw(st.booleans()),
    )


@st.composite
def attributes(draw: st.DrawFn) -> Fields:
    names = draw(st.lists(NAMES, unique=True, min_size=1, max_size=4))
    since, until = sorted(draw(st.tuples(RELEASES, RELEASES)))
    return Fields(
        draw(PATHS),
        draw(st.just("") | NAMES),
        tuple(names),
        draw(REASONS),
        draw(st.none() | st.just("") | PATHS),
        draw(st.sampled_from(["", "{}.{}".format(*since)])),
        draw(st.sampled_from(["", "{}.{}".format(*until)])),
    )


def written(seam: Seam | Fields) -> str:
    """The line of a seam."""
    if isinstance(seam, Fields):
        line = f"{seam.module}:{seam.owner}{{{', '.join(seam.names)}}}"
        runner = seam.at
    else:
        by_name = ("*", *seam.named) if seam.named else ()
        more = () if seam.called else ("...",)
        line = f"{seam.module}:{seam.name}({', '.join((*seam.parameters, *by_name, *more))})"
        runner = seam.at.rpartition(".")[0] if seam.at else None
    if runner is not None:
        line += f" @runner.{runner}" if runner else " @runner"
    if isinstance(seam, Fields):
        line += f" since {seam.since}" if seam.since else ""
        line += f" until {seam.until}" if seam.until else ""
    return f"{line}  # {seam.why}"


def text_of(*lines: str) -> str:
    """These lines below the first heading, and the other headings."""
    first, *rest = seam_lines.HEADINGS
    return "\n".join([f"[{first}]", *lines, *(f"[{name}]" for name in rest)])


@given(
    st.lists(
        st.lists(functions() | attributes(), max_size=3),
        min_size=len(seam_lines.HEADINGS),
        max_size=len(seam_lines.HEADINGS),
    )
)
def test_seams_are_read_as_they_were_written(groups):
    lines = ["# a comment"]
    for heading, group in zip(seam_lines.HEADINGS, groups, strict=True):
        lines += ["", f"[{heading}]  # what it is", *map(written, group)]
    assert seam_lines.parse("\n".join(lines)) == {
        heading: SeamGroup.of(group)
        for heading, group in zip(seam_lines.HEADINGS, groups, strict=True)
    }


@given(functions() | attributes(), st.data())
def test_a_line_that_is_read_is_the_line_of_what_was_read(seam, data):
    """No two lines mean the same, so that nothing in a line is overlooked."""
    line = written(seam)
    start = data.draw(st.integers(0, len(line)))
    stop = data.draw(st.integers(start, min(start + 3, len(line))))
    changed = line[:start] + data.draw(st.text(" ,.*#:(){}@a0", max_size=2)) + line[stop:]
    try:
        group = seam_lines.parse(text_of(changed))["process"]
    except ValueError as error:
        group, message = None, str(error)
    if group is None:
        assert message.startswith(f"seams, line 2: {changed!r}: expected ")
    else:
        read = [written(entry) for entry in (*group.functions, *group.fields)]
        assert read == ([] if changed.startswith("#") else [changed])


FORMS = "expected [heading], `module:function(argument, ...)  # why` or `module:Class{attribute,"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("vllm.a.f(x)  # why", FORMS),
        ("vllm.a:f(x)", FORMS),
        ("vllm.a:f(x)  # why ", FORMS),
        (" vllm.a:f(x)  # why", FORMS),
        ("vllm.a:A.B.f()  # why", FORMS),
        ("vllm.a:f(x,y)  # why", FORMS),
        ("vllm.a:f(x, *)  # why", FORMS),
        ("vllm.a:f(..., x)  # why", FORMS),
        ("vllm.a:f(x) since 0.28  # why", FORMS),
        ("vllm.a:f(x) @worker  # why", FORMS),
        ("vllm.a:{}  # why", FORMS),
        ("vllm.a:A{x, ...}  # why", FORMS),
        ("vllm.a:A{x} until 0.30 since 0.28  # why", FORMS),
        ("vllm.a:A{x} since 0.28.1  # why", FORMS),
        ("vllm.a:A{ä}  # why", FORMS),
        ("[offline] # offline engines", FORMS),
        ("vllm.a:f(x, *, x)  # why", "expected x once"),
        ("vllm.a:A{x, y, x, y}  # why", "expected x, y once"),
        ("vllm.a:A{x} since 0.30 until 0.28  # why", "expected `until` to be 0.30 or later"),
        ("[process]", "expected a heading of offline, async, server, model, v1, v2"),
        ("[worker]", "expected a heading of offline, async, server, model, v1, v2"),
    ],
)
def test_a_line_that_is_wrong_is_named_with_its_number_and_what_would_be_right(line, expected):
    start = re.escape(f"seams, line 3: {line!r}: {expected}")
    with pytest.raises(ValueError, match=f"^{start}"):
        seam_lines.parse(text_of("vllm.a:g()  # a seam", line))


def test_a_seam_above_all_headings_is_rejected():
    with pytest.raises(ValueError, match=r"^seams, line 2: .*: expected a heading above it, such"):
        seam_lines.parse("# comment\nvllm.a:f()  # why\n[process]")


def test_a_text_without_some_heading_is_rejected():
    """A group without seams would be checked without any effect."""
    with pytest.raises(ValueError, match=r"^seams: expected the headings \[v1\], \[v2\] as well$"):
        seam_lines.parse("[process]\n[offline]\n[async]\n[server]\n[model]")


def test_arguments_by_name_and_arguments_that_are_passed_on_are_told_apart():
    groups = seam_lines.parse(
        text_of(
            "vllm.a:A.f(x, *, y, z) @runner.state  # calls",
            "vllm.a:g(x, ...)  # wraps",
            "vllm.a:{B, C} until 0.30  # reads",
            "vllm.a:B{n} @runner  # sets",
        )
    )
    assert groups["process"] == (
        (
            Seam("vllm.a", "A.f", ("x",), "calls", ("y", "z"), "state.f", called=True),
            Seam("vllm.a", "g", ("x",), "wraps"),
        ),
        (
            Fields("vllm.a", "", ("B", "C"), "reads", until="0.30"),
            Fields("vllm.a", "B", ("n",), "sets", at=""),
        ),
    )
    assert groups["v1"] == ((), ())
