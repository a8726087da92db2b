"""What is kept with cached blocks, with draft tokens, in a process of its own: see what it runs."""

from pathlib import Path

from support.own_process import environment, run

CASES = Path(__file__).with_name("kept_while_drafting.py")


def test_what_is_kept_of_drafted_tokens_is_that_of_an_engine_without_drafts_and_cache() -> None:
    # To compile the search for n-grams takes seven seconds; it is not used.
    env = environment(NUMBA_DISABLE_JIT="1")
    code, out, error = run("-m", "pytest", "-q", "-p", "no:xdist", CASES, timeout=540, env=env)
    assert code == 0, f"{out[-6000:]}\n{error[-2000:]}"
