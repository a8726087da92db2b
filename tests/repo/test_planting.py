"""A fault finds its place by name and syntax tree, wherever and however the code is written."""

import ast
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.faults import FAULTS, Fault
from support.planting import NoPlaceError, Package

QUEUE = '''"""A queue."""
import os

_LIMIT = 3  # seconds

if os.name == "posix":
    def _lock():
        return 1


def retried(times):
    return lambda made: made


class Queue:
    """Waits."""

    limit: int = 5

    @retried(3)
    @property
    async def size(self):
        try:
            # All of them.
            return sum(len(part) for part in self._parts if part and not part.is_over)
        except (KeyError, ValueError) as error:
            raise RuntimeError(f"lost {self._parts!r} of {'many'}") from error

    def put(self, row, at=None):
        self._check(row); self._rows[at] = row
        if at is None:  # the end
            self._count += 1
        elif at < 0:
            # From behind.
            self._fill(at)
        else:
            pass
        for part in self._parts: part.see(row)
        with self._lock:
            self._count += 2

        def inner():
            return at
        return inner
'''


@pytest.fixture
def package(tmp_path):
    """A function that writes a package of texts by path."""

    def write(files=None, folder="queue"):
        root = tmp_path / folder / "things"
        for name, text in (files or {"queue.py": QUEUE}).items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return Package(root)

    return write


@pytest.fixture(scope="module")
def whole():
    """The package itself."""
    return Package(Path(__file__).resolve().parents[2] / "src" / "midstream")


def plant(package, where, before, after):
    path, text = package.plant(Fault("never", where, "test", before, after))
    return path.as_posix(), text


# where, before, after; if they differ from these, a line and what the planted text has instead.
CASES = {
    "expression": ("Queue.put", "at < 0", "at <= 0", "elif at < 0:", "elif at <= 0:"),
    "comprehension": (
        "Queue.size",
        "sum(len(part) for part in self._parts if part and not part.is_over)",
        "sum(len(part) for part in self._parts)",
    ),
    "part of a comprehension": (
        "Queue.size", "part and not part.is_over", "part", "if part and not part.is_over", "if part"
    ),
    "what is assigned": (
        "Queue.put", "self._rows[at]", "self._rows[0]", "self._rows[at] =", "self._rows[0] ="
    ),
    "statement": ("Queue.put", "self._fill(at)", "return 3"),
    "statement among others": ("Queue.put", "self._check(row)", "row += 1"),
    "header of if": ("Queue.put", "if at is None:", "if False:"),
    "header of elif": ("Queue.put", "elif at < 0:", "elif True:"),
    "header of for": ("Queue.put", "for part in self._parts:", "for part in self._parts[1:]:"),
    "header of with": ("Queue.put", "with self._lock:", "with other:"),
    "header of except": (
        "Queue.size", "except (KeyError, ValueError) as error:", "except KeyError as error:"
    ),
    "statements before a header": (
        "Queue.put",
        "for part in self._parts:",
        "row = 3\nfor part in self._parts:",
        "    for part in self._parts:",
        "    row = 3\n        for part in self._parts:",
    ),
    "decorator": ("Queue.size", "retried(3)", "retried(4)", "@retried(3)", "@retried(4)"),
    "header with decorators": (
        "Queue.size",
        "@retried(3)\n@property\nasync def size(self):",
        "@property\nasync def size(self):",
        "@retried(3)\n    @property",
        "@property",
    ),
    "part of an f-string": ("Queue.size", "'many'", "12", "{'many'}", "{12}"),
    "assignment of a module": ("_LIMIT", "_LIMIT = 3", "_LIMIT = 4"),
    "assignment of a class": ("Queue.limit", "5", "6", "limit: int = 5", "limit: int = 6"),
    "class": ("Queue", "limit: int = 5", "limit: str = 5"),
    "module": ("queue:", "import os", "import os as os2"),
    "below an if": ("_lock", "return 1", "return 2"),
    "function in a function": ("Queue.put.inner", "return at", "return None"),
    "nothing instead": ("Queue.put", "return inner", "", "        return inner\n", ""),
    "nothing in a body": ("Queue.put", "self._count += 2", "", "self._count += 2", "pass"),
}  # fmt: skip


def same(text, other):
    return ast.dump(ast.parse(text)) == ast.dump(ast.parse(other))


@pytest.mark.parametrize("name", CASES)
def test_the_planted_code_stands_in_place_of_the_other_wherever_and_however_it_is_written(
    package, name
):
    where, before, after, *lines = CASES[name]
    line, other = lines or (before, after)
    path, text = plant(package(), where, before, after)
    assert path == "queue.py"
    assert QUEUE.count(line) == 1
    assert same(text, QUEUE.replace(line, other))
    assert text.count("\n") >= QUEUE.count("\n")
    expected = list(map(ast.dump, ast.parse(QUEUE.replace(line, other)).body))
    moved = ast.unparse(ast.parse(QUEUE)) + "\n\n\ndef added():\n    return 1\n"
    for path in ("queue.py", "other/folder/rows.py", "new/__init__.py"):
        if name == "module":
            where = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") + ":"
        _, text = plant(package({path: moved}, path), where, before, after)
        assert list(map(ast.dump, ast.parse(text).body[:-1])) == expected, path


@pytest.mark.parametrize(
    "before",
    [
        "sum( len( part )for part in(self._parts)if(part and(not part.is_over)) )",
        "sum(\n  len(part)  # how long\n  for part in self._parts\n  if part and not part.is_over)",
        "\n        sum(len(part) for part in self._parts if part and not part.is_over)\n",
    ],
)
def test_the_code_of_a_fault_may_be_written_in_any_way(package, before):
    _, text = plant(package(), "Queue.size", before, "0")
    expression = "sum(len(part) for part in self._parts if part and not part.is_over)"
    assert same(text, QUEUE.replace(expression, "0"))


def test_quotes_text_beyond_ascii_and_code_elsewhere_do_not_matter(package):
    source = "def named():\n    é = 'ü'; return 'ü' + \"é\" + é\n"
    _, text = plant(package({"names.py": source}), "named", '"ü" + "é"', '"a" "b"')
    assert same(text, "def named():\n    é = 'ü'; return 'ab' + é\n")
    source = "class Row:\n    @property\n    def at(self):\n        return self._at\n\n"
    source += "    @at.setter\n    def at(self, at):\n        self._at = at\n"
    _, text = plant(package({"rows.py": source}), "Row.at", "self._at = at", "self._at = at + 1")
    assert same(text, source.replace("= at\n", "= at + 1\n"))
    source = "def one():\n    return go()\n\n\ndef two():\n    return go()\n"
    _, text = plant(package({"rows.py": source}), "two", "return go()", "return None")
    assert same(text, "def one():\n    return go()\n\n\ndef two():\n    return None\n")


def test_a_name_that_is_not_in_one_module_is_answered_with_what_to_write(package):
    texts = dict.fromkeys(("a/gates.py", "b/gates.py", "c/rows.py"), "def read():\n    return 1\n")
    files = package({**texts, "d/write.py": "write()"})
    gates = "`things.a.gates:read`, `things.b.gates:read`"
    for where, message in (
        ("read", f"`read` is in 3 modules; write one of {gates}, `things.c.rows:read`"),
        ("gates:read", f"is in 2 modules; write one of {gates}"),
        ("other:read", f"is in 0 modules; write one of {gates}, `things.c.rows:read`"),
        ("write", "nothing is named `write`"),
        ("Reader.read", "nothing is named `Reader.read`"),
    ):
        with pytest.raises(NoPlaceError) as caught:
            plant(files, where, "return 1", "return 2")
        assert message in str(caught.value)
    assert plant(files, "things.a.gates:read", "1", "2")[0] == "a/gates.py"
    assert plant(files, "a.gates:read", "1", "2")[0] == "a/gates.py"
    assert plant(files, "rows:read", "1", "2")[0] == "c/rows.py"


@pytest.mark.parametrize(
    "before", ["self._full(at)", "if at == 0:", "return inner\nself._fill(at)"]
)
def test_code_that_is_not_there_is_no_place(package, before):
    after = "if at:" if before.endswith(":") else "pass"
    with pytest.raises(NoPlaceError, match=r"`Queue.put` in queue.py has this code 0 times"):
        plant(package(), "Queue.put", before, after)


def test_code_that_is_there_twice_is_no_place_but_more_of_it_is(package):
    with pytest.raises(NoPlaceError, match=r"3 times, in lines 30, 30, 38: write more of it"):
        plant(package(), "Queue.put", "row", "None")
    _, text = plant(package(), "Queue.put", "part.see(row)", "part.see(None)")
    assert same(text, QUEUE.replace("see(row)", "see(None)"))


def test_a_header_becomes_no_statement_and_what_is_no_code_is_refused(package):
    with pytest.raises(NoPlaceError, match="a header, and none"):
        plant(package(), "Queue.put", "with self._lock:", "pass")
    with pytest.raises(SyntaxError):
        plant(package(), "Queue.put", "at <", "at")
    with pytest.raises(SyntaxError):
        plant(package(), "Queue.put", "elif at < 0:", "while True:")


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_faults_stay_where_they_are_when_the_file_is_reformatted_or_moved(
    whole, tmp_path_factory, data
):
    """The trees with the fault are equal: of the file as it is, and as other text elsewhere."""
    fault = data.draw(st.sampled_from(FAULTS))
    path, text = whole.plant(fault)
    root = tmp_path_factory.mktemp("moved") / "midstream"
    moved = root / "lab" / path
    moved.parent.mkdir(parents=True)
    source = ast.unparse(ast.parse(whole.text(path)))
    moved.write_text(f'"""Text."""\n# {fault.never}\n' + source)
    where = fault.where if fault.where.endswith(":") else fault.where.rpartition(":")[2]
    _, other = Package(root).plant(fault._replace(where=where))
    assert ast.dump(ast.parse(other)) == ast.dump(ast.parse('"""Text."""\n' + text))
