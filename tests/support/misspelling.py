"""Names at a small edit distance, and values that ask for something."""

import string

from hypothesis import strategies as st

LETTERS = string.ascii_letters + string.digits + "_-."
# One value in the form of each field of midstream.
ASKED = {
    "capture": {"layers": [1]},
    "edits": [{"op": "steer", "vector": [1.0, 2.0, 3.0], "layer": 1}],
    "steer": {"vector": [1.0, 2.0, 3.0], "layer": 1},
    "probes": {"vector": [1.0, 2.0, 3.0], "layer": 1, "name": "p"},
    "controller": {"threshold": {"probe": "p", "above": 1.0}},
}


@st.composite
def misspelt(draw: st.DrawFn, name: str) -> str:
    """Return the name after one or two insertions, deletions or replacements of a letter."""
    found = name
    for _ in range(draw(st.integers(1, 2))):
        kind = draw(st.sampled_from(["insert", "delete", "replace"]))
        at = draw(st.integers(0, len(found) - (kind != "insert")))
        letter = draw(st.sampled_from(LETTERS)) if kind != "delete" else ""
        found = found[:at] + letter + found[at + (kind != "insert") :]
    return found
