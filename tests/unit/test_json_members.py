"""JSON that is read member by member is what it is as a whole."""

import json

from hypothesis import example, given
from hypothesis import strategies as st

from midstream.errors import SpecError
from midstream.validation import BYTE_ORDER_MARK, encoded, read_json, read_json_members

BODIES = [
    '{"a": 1, "b": [1, 2], "c\\u00e9": {"d": "e"}, "f": NaN}', ' {\t"a" : "é☕" ,\n"b":null } ',
    '{"a":1}', "{}", "[]", '"x"', "", '{"a":1,}', '{"a" 1}', '{"a":}', '{"a": 1} x', "{1: 2}",
    BYTE_ORDER_MARK + '{"a": 1, "a": 2}', '{"a": {"b": 1, "b": 2}}', "[" * 100_000,
    '{"a": ' + "[" * 100_000,
]  # fmt: skip
MARKS = '{}[]",: \\1aé\n'


def result(read, data):
    """What was read, or what is wrong with it."""
    try:
        return read(data)
    except SpecError as error:
        return str(error)


@given(st.data())
@example(None)
def test_members_are_those_of_the_whole(data):
    bodies = BODIES
    if data is not None:
        body = list(data.draw(st.sampled_from(BODIES[:14])))
        for _ in range(data.draw(st.integers(0, 3))):
            where = data.draw(st.integers(0, len(body)))
            body[where : where + data.draw(st.integers(0, 1))] = data.draw(st.sampled_from(MARKS))
        bodies = ["".join(body)]
    for body in bodies:
        sent = body.encode()
        whole = result(read_json, sent)
        assert result(lambda one: read_json_members(one)[0], sent) == whole
        if isinstance(whole, dict):
            _, text, places = read_json_members(sent)
            assert set(places) == set(whole)
            for name, (start, stop) in places.items():
                assert json.loads(b"".join(encoded(text, start, stop))) == whole[name]


def test_a_long_text_is_the_same_wherever_it_is_cut():
    text = "é☕a" * 700_000
    value, _, places = read_json_members(json.dumps({"a": text}, ensure_ascii=False).encode())
    assert value == {"a": text}
    assert list(places) == ["a"]
    broken = json.dumps({"a": text}, ensure_ascii=False).encode()[:-4]
    assert "expected JSON: 'utf-8'" in result(read_json, broken)
