"""Random mixes of requests on one engine; each is compared with the same request alone.

A mix is drawn from a seed (`adversary_mix`), driven through an engine by its step loop
(`adversary_run`) and judged (`adversary_judge`). When a request differs, the mix is made smaller as
long as it still does, and written to a file that can be asked again.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from midstream.sites import INNER
from support.adversary_judge import Measure, against_hooks, completions, differences, parted
from support.adversary_mix import Ask, Mix
from support.adversary_run import Driver, Ran, alone, assert_idle_and_clean
from support.adversary_where import Place
from support.oracle_edits import EditOracle

HELD_AGAINST_HOOKS = 10
SHRINKING_S = 90.0


@dataclass
class Totals:
    """Totals over mixes, with which a test checks that the mixes had all features."""

    requests: int = 0
    completions: int = 0
    asking: int = 0
    edited: int = 0
    captured: int = 0
    probed: int = 0
    given_up: int = 0
    preemptions: int = 0
    chunked: int = 0
    hits: int = 0
    edited_hits: int = 0
    inner_edits: int = 0
    inner_rows: int = 0
    of_heads: int = 0
    of_dims: int = 0
    captured_hits: int = 0
    scored_hits: int = 0
    cached_edits: int = 0
    stopped: int = 0
    parted: int = 0
    held_against_hooks: int = 0

    def __str__(self) -> str:
        return "\n".join(
            f"{one.name.replace('_', ' '):20} {getattr(self, one.name):7}" for one in fields(self)
        )


@dataclass
class Bench:
    """What a mix runs on."""

    mixed: Any  # the engine of the mix: prefix caching on, a small KV cache, its statistics on
    single: Any  # the engine of one request at a time, without a prefix cache
    hooks: EditOracle  # the model in transformers
    measure: Measure  # what counts as the same
    chunk: int  # most tokens of a step of the first
    folder: Path  # where mixes that differ are written
    hooked: Measure | None = None  # what counts as the same as transformers; None: `measure`

    def run(self, mix: Mix, totals: Totals) -> None:
        """Runs a mix and adds it to the totals."""
        driver = Driver(self.mixed)
        ran = driver.run(mix.coming, mix.count)
        assert_idle_and_clean(self.mixed)
        for nth, ask in enumerate(ran.asks):
            output = ran.outputs.get(ask.number)
            if output is None:
                continue
            expected = alone(self.single, ask)
            wrong = differences(ask, output, expected, self.measure)
            if ask.number % HELD_AGAINST_HOOKS == 0:
                totals.held_against_hooks += 1
                wrong += [
                    f"transformers: {each}"
                    for each in against_hooks(ask, output, self.hooks, self.hooked or self.measure)
                ]
            if wrong:
                raise AssertionError(self._explain(mix.seed, ran.asks, nth, wrong))
            _count(ask, output, totals, self.chunk)
            totals.parted += parted(output, expected)
        totals.requests += len(ran.asks)
        totals.given_up += len(ran.given_up)
        totals.preemptions += ran.preemptions

    def replay(self, file: Path) -> Ran:
        """Asks a written mix again."""
        asks = [Ask.parse(one) for one in json.loads(file.read_text())]
        ran = Driver(self.mixed).again(asks)
        for ask in asks:
            if ask.number in ran.outputs:
                wrong = self._wrong(ask, ran)
                assert not wrong, f"{ask}\n" + "\n".join(wrong)
        return ran

    def _wrong(self, ask: Ask, ran: Ran) -> list[str]:
        output = ran.outputs.get(ask.number)
        if output is None:
            return []
        return differences(ask, output, alone(self.single, ask), self.measure)

    def _explain(self, seed: int, asks: Sequence[Ask], nth: int, wrong: list[str]) -> str:
        bad = asks[nth]
        until = time.monotonic() + SHRINKING_S

        def fails(some: Sequence[Ask]) -> bool:
            if time.monotonic() > until:
                return False
            return bool(self._wrong(bad, Driver(self.mixed).again(some)))

        again = fails(asks)
        few = smallest(asks, bad, fails) if again else list(asks)
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / f"mix-{seed}-{bad.number}.json"
        file.write_text(json.dumps([ask.to_dict() for ask in few]))
        shown = "\n".join(wrong[:12])
        with_whom = [ask.number for ask in few if ask is not bad]
        note = (
            f"it differs still with {len(with_whom)} others of {len(asks) - 1}: {with_whom[:30]}"
            if again
            else "asked again in the same mix it does not differ"
        )
        return (
            f"seed {seed}: {bad}\n{shown}\n{note}\n"
            f"ask again: MIDSTREAM_ADVERSARY_REPLAY={file} (or the whole: "
            f"MIDSTREAM_ADVERSARY_SEED={seed})"
        )


def smallest(asks: Sequence[Ask], bad: Ask, fails: Callable[[Sequence[Ask]], bool]) -> list[Ask]:
    """As few of the requests as it takes for one of them to differ, found by leaving out more and
    more finely cut parts.
    """
    keep = [ask for ask in asks if ask is not bad]
    size = len(keep)
    while keep and size:
        for start in range(0, len(keep), size):
            some = [*keep[:start], *keep[start + size :]]
            if fails(sorted([*some, bad], key=lambda ask: ask.number)):
                keep = some
                break
        else:
            size //= 2
        size = min(size, len(keep))
    return sorted([*keep, bad], key=lambda ask: ask.number)


def _count(ask: Ask, output: Any, totals: Totals, chunk: int) -> None:
    hit = output.num_cached_tokens > 0
    totals.completions += len(output.outputs)
    totals.asking += ask.alone is not None
    totals.edited += bool(ask.parts)
    totals.captured += bool(ask.alone and ask.alone.get("capture"))
    totals.probed += bool(ask.probes)
    totals.chunked += len(ask.prompt) > chunk
    totals.hits += hit
    totals.edited_hits += hit and bool(ask.parts)
    totals.scored_hits += hit and bool(ask.probes)
    totals.captured_hits += hit and bool(ask.alone and ask.alone.get("capture"))
    inner = [edit for edit in map(_changing, ask.parts) if edit.sites.names[0] in INNER]
    totals.inner_edits += bool(inner)
    totals.of_heads += any(edit.heads for edit in inner)
    totals.of_dims += any(getattr(edit, "dims", ()) for edit in map(_changing, ask.parts))
    totals.inner_rows += any(
        site in INNER
        for _, holder in completions(output)
        for site, _ in getattr(holder, "activations", None) or ()
    )
    totals.stopped += any(one.finish_reason == "stop" for one in output.outputs)
    for _, holder in completions(output):
        receipt = getattr(holder, "receipt", None)
        edited = None if receipt is None else receipt.edited
        totals.cached_edits += 0 if edited is None else edited.cached


def _changing(part: tuple[Any, Place]) -> Any:
    """The edit, or the one behind a gate."""
    return getattr(part[0], "edit", part[0])
