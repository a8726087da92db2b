"""Plans: the captures, edits and probes of one request. Importable without torch and vLLM."""

from __future__ import annotations

from midstream.plan.captured_rows import CapturedRows
from midstream.plan.classifiers.attention_pool import AttentionPool
from midstream.plan.classifiers.classes import Classes
from midstream.plan.classifiers.hidden import Hidden
from midstream.plan.classifiers.mlp import MLP
from midstream.plan.control.act import Flag, Stop, Switch
from midstream.plan.control.controller import Controller
from midstream.plan.instructions import Instruction
from midstream.plan.operations import (
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
from midstream.plan.plan import Plan
from midstream.plan.positions.items import Image, Media
from midstream.plan.positions.position_set import Match, Where
from midstream.plan.positions.positions import (
    Between,
    Positions,
    Role,
    Span,
    Text,
    TokenIds,
    Window,
)
from midstream.plan.positions.prompt import Prompt
from midstream.plan.probe import Probe
from midstream.plan.probe_files.difference import ProbeDiff
from midstream.plan.probe_files.info import Calibration, ProbeInfo
from midstream.plan.readouts.attention import Attention, Entropy, Mass, TopKeys
from midstream.plan.readouts.capture import Capture
from midstream.plan.readouts.features import Features
from midstream.plan.readouts.lens import Lens
from midstream.plan.readouts.logits import Logits
from midstream.plan.readouts.norms import Norms
from midstream.plan.resolved import (
    ResolvedCapture,
    ResolvedEdit,
    ResolvedPlan,
    ResolvedProbe,
    Steps,
)
from midstream.plan.selection import Layers, Sites
from midstream.plan.shape import ModelShape
from midstream.plan.vectors.named_vector import Named
from midstream.plan.vectors.vector import Vector

__all__ = [
    "Ablate",
    "Affine",
    "Attention",
    "AttentionPool",
    "Between",
    "Bias",
    "Calibration",
    "Capture",
    "CapturedRows",
    "Clamp",
    "Classes",
    "Controller",
    "Edit",
    "Entropy",
    "Feature",
    "Features",
    "Flag",
    "Gate",
    "Hidden",
    "Image",
    "Instruction",
    "Layers",
    "Lens",
    "LoReFT",
    "Local",
    "Logits",
    "MLP",
    "Mass",
    "Match",
    "Media",
    "ModelShape",
    "Named",
    "Norms",
    "Plan",
    "Positions",
    "Probe",
    "ProbeDiff",
    "ProbeInfo",
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
