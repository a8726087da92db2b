"""Random stores for tests of datasets, and what was written to them, row by row."""

import itertools

import torch
from hypothesis import strategies as st
from unit.store.making import HIDDEN, header, rows_of, vectors, write

from midstream import open_store
from midstream.store import Entry

TAPS = (("resid_post", 2), ("mlp_in", 12), ("mlp_out", 12), ("resid_post", 31))
CODECS = ("raw", "full8", "topk8:k=4")
DTYPES = ("bfloat16", "float32")


@st.composite
def completions(draw, whole=False):
    """Positions of each tap, for several completions; `whole`: all taps have all positions."""
    made = []
    for _ in range(draw(st.integers(1, 8))):
        length = draw(st.integers(0, 12))
        positions = {}
        for tap in TAPS:
            kind = "all" if whole else draw(st.sampled_from(["all", "all", "all", "some", "none"]))
            if kind == "all":
                positions[tap] = list(range(length))
            elif kind == "some":
                positions[tap] = sorted(draw(st.sets(st.integers(0, 14), max_size=10)))
        made.append((positions, draw(st.integers(0, 8))))
    return made


class Written:
    """A store, and the rows that were written to it."""

    def __init__(self, root, made, *, codec="raw", dtype="bfloat16", widths=(), shard_bytes=2000):
        self.head = header(codec=codec, dtype=dtype, widths=widths)
        # (request, position) -> token id; (request, position, tap) -> what a reader must decode.
        self.tokens, self.rows = {}, {}
        self.prompts = {str(number): prompt for number, (_, prompt) in enumerate(made)}
        numbers = itertools.count()
        entries = []
        for request, (positions, prompt) in enumerate(made):
            taps = {}
            for tap, places in positions.items():
                values = vectors(next(numbers), len(places), self.head, tap)
                tokens = [100 * request + place for place in places]
                taps[tap] = rows_of(values, self.head, places, tokens)
                for at, place in enumerate(places):
                    self.tokens[str(request), place] = tokens[at]
                    row = taps[tap].data[at : at + 1]
                    self.rows[str(request), place, tap] = self.head.open_codec().decode(
                        row, self.head.width(tap), self.head.torch_dtype
                    )[0]
            entries.append(Entry(request=str(request), prompt_tokens=prompt, taps=taps))
        write(root, entries, self.head, shard_bytes=shard_bytes)
        self.store = open_store(root)

    def joined(self, taps):
        """(request, position) of the tokens with a row at each of the taps."""
        return {token for token in self.tokens if all((*token, tap) in self.rows for tap in taps)}

    def partial(self, taps):
        """(request, position) of the tokens with a row at some of the taps only."""
        has = {token for token in self.tokens if any((*token, tap) in self.rows for tap in taps)}
        return has - self.joined(taps)


def stores(whole=False):
    """Arguments of `Written`."""
    wide = st.sampled_from([(), {TAPS[1]: 12}, {TAPS[1]: 12, TAPS[3]: 5}])
    return st.tuples(
        completions(whole),
        st.fixed_dictionaries(
            {
                "codec": st.sampled_from(CODECS),
                "dtype": st.sampled_from(DTYPES),
                "widths": wide,
                "shard_bytes": st.sampled_from([600, 2000, 10**6]),
            }
        ),
    )


def values_of(batch, taps, head):
    """Return [(values of the taps)] of each row of a batch, from either form of `values`."""
    values = batch["values"]
    if {head.width(tap) for tap in taps} == {head.width(taps[0])}:
        assert isinstance(values, torch.Tensor)
        assert values.shape[-2:] == (len(taps), head.width(taps[0]))
        return [values[..., at, :] for at in range(len(taps))]
    assert list(values) == [f"{site}.{layer}" for site, layer in taps]
    return list(values.values())


assert HIDDEN == 8
