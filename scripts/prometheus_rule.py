"""Write deploy/alerts.yaml as a PrometheusRule, which the Prometheus operator reads.

    python scripts/prometheus_rule.py [--check]

With --check nothing is written; the exit status is 1 if the file differs.
"""

from __future__ import annotations

import sys
from pathlib import Path

DEPLOY = Path(__file__).resolve().parents[1] / "deploy"
TARGET = DEPLOY / "kubernetes" / "components" / "monitoring" / "prometheus-rule.yaml"
_HEAD = """\
# Written by scripts/prometheus_rule.py of deploy/alerts.yaml.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: midstream
  labels:
    app.kubernetes.io/name: midstream
spec:
"""


def rule() -> str:
    """Return the text of the file."""
    lines = (DEPLOY / "alerts.yaml").read_text(encoding="utf-8").splitlines()
    body = lines[lines.index("groups:") :]
    return _HEAD + "\n".join(f"  {line}".rstrip() for line in body) + "\n"


def main() -> int:
    text = rule()
    if "--check" in sys.argv[1:]:
        return int(not TARGET.exists() or TARGET.read_text(encoding="utf-8") != text)
    TARGET.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
