"""Through which ranks of a tensor-parallel group, all of which have the same vectors, captured ones
leave. What comes back is the same.

| `return` | |
|---|---|
| `gathered` | all through the first rank |
| `sharded` | of n ranks each moves every n-th tap of a token: 1/n of the bytes each |
"""

from __future__ import annotations

GATHERED, SHARDED = RETURNS = ("gathered", "sharded")
