"""Number of rounds of open-ended tests: few in the suite, more with `scripts/nightly.sh`."""

import os

NIGHTLY = os.environ.get("MIDSTREAM_NIGHTLY", "0") not in ("", "0")


def rounds(*, suite: int, nightly: int) -> int:
    """How many rounds to run here."""
    return nightly if NIGHTLY else suite
