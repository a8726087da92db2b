"""What a store contains: sites with the widths of their vectors."""

import json

from rich.console import Console
from unit.store.making import entry, header, write

from midstream import open_store
from midstream.lab.tools.inspect.overview import Overview
from midstream.lab.tools.inspect.table import render

TAPS = (("attn_out", 0), ("attn_out", 1), ("resid_post", 1))


def shown(overview):
    console = Console(width=120)
    with console.capture() as found:
        console.print(render(overview))
    return found.get()


def test_the_widths_of_a_site_are_told_where_they_differ(tmp_path):
    head = header(widths={TAPS[0]: 12, TAPS[1]: 16})
    for request, taps in (("a", TAPS), ("b", TAPS[2:])):
        write(tmp_path, [entry(request, taps=taps, head=head)], head)
    overview = Overview.of(open_store(tmp_path))
    assert overview.headers == (header(),), "the same for both shards"
    assert [(one.site, one.widths) for one in overview.sites] == [
        ("attn_out", (12, 16)),
        ("resid_post", (8,)),
    ]
    assert "12, 16" in shown(overview)
    plain = json.loads(json.dumps(overview.to_dict()))
    assert plain["headers"] == [header().to_dict()]
    assert plain["sites"][0]["widths"] == [12, 16]


def test_a_store_of_one_width_has_no_column_for_it(tmp_path):
    write(tmp_path, [entry("a", taps=TAPS)])
    overview = Overview.of(open_store(tmp_path))
    assert "8 wide" in shown(overview)
    assert "width" not in shown(overview).split("\n", 1)[1]
