"""Rewards from probes and rows of the forward pass that samples, for trainers by reinforcement.

Needs neither vLLM nor TRL until a completion is sampled.
"""

from __future__ import annotations

from midstream.lab.rl.reward import ProbeReward, probe_reward
from midstream.lab.rl.rollout import Rollout

__all__ = ["ProbeReward", "Rollout", "probe_reward"]
