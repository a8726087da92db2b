"""Plans: the captures, edits and probes of one request, with parsing, JSON and resolution.

Pure Python: importable without torch and without vLLM.
"""

from __future__ import annotations

from midstream.spec.act import Flag, Stop, Switch
from midstream.spec.captured_rows import CapturedRows
from midstream.spec.controller import Controller
from midstream.spec.instructions import Instruction
from midstream.spec.mlp import MLP
from midstream.spec.named_vector import Named
from midstream.spec.operations import (
    Ablate,
    Affine,
    Bias,
    Clamp,
    Edit,
    Feature,
    Gate,
    Local,
    LoReFT,
    Reading,
    Reconstruct,
    Replace,
    Route,
    Scale,
    Steer,
)
from midstream.spec.plan import Plan
from midstream.spec.positions.position_set import Match, Where
from midstream.spec.positions.positions import Positions, Role, Span, Text, TokenIds, Window
from midstream.spec.positions.prompt import Prompt
from midstream.spec.probe import Probe
from midstream.spec.readouts.attention import Attention, Entropy, Mass, TopKeys
from midstream.spec.readouts.capture import Capture
from midstream.spec.readouts.features import Features
from midstream.spec.readouts.lens import Lens
from midstream.spec.readouts.logits import Logits
from midstream.spec.readouts.norms import Norms
from midstream.spec.resolved import (
    ResolvedCapture,
    ResolvedEdit,
    ResolvedPlan,
    ResolvedProbe,
    Steps,
)
from midstream.spec.selection import Layers, Sites
from midstream.spec.shape import ModelShape
from midstream.spec.vector import Vector

__all__ = [
    "Ablate",
    "Affine",
    "Attention",
    "Bias",
    "Capture",
    "CapturedRows",
    "Clamp",
    "Controller",
    "Edit",
    "Entropy",
    "Feature",
    "Features",
    "Flag",
    "Gate",
    "Instruction",
    "Layers",
    "Lens",
    "LoReFT",
    "Local",
    "Logits",
    "MLP",
    "Mass",
    "Match",
    "ModelShape",
    "Named",
    "Norms",
    "Plan",
    "Positions",
    "Probe",
    "Prompt",
    "Reading",
    "Reconstruct",
    "Replace",
    "ResolvedCapture",
    "ResolvedEdit",
    "ResolvedPlan",
    "ResolvedProbe",
    "Role",
    "Route",
    "Scale",
    "Sites",
    "Span",
    "Steer",
    "Steps",
    "Stop",
    "Switch",
    "Text",
    "TokenIds",
    "TopKeys",
    "Vector",
    "Where",
    "Window",
]
