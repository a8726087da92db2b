"""`midstream.LLM`: the offline engine, with sweeps, questions, scores of texts and `tune`."""

from __future__ import annotations

from midstream.api import llm
from midstream.lab.api.ask_calls import OfflineQuestions
from midstream.lab.api.cached_run import CachedRuns
from midstream.lab.api.evaluations import Evaluations
from midstream.lab.api.sweep_calls import OfflineSweeps
from midstream.validation import suggests

# Names of other tools.
_HOOKS = "llm.generate(prompt, edits=…) changes activations, llm.run_with_cache(prompt) reads them"
_READ = "write llm.generate(prompt, capture=[10]), or llm.run_with_cache(prompt)"
_STEER = "write llm.generate(prompt, edits=Steer(vector, layer=14)), or llm.steering.set(base=…)"
_MODEL = "the model is in vLLM's worker; llm.parameter(name) reads weights, llm.info describes it"
_INSTEAD = {
    **dict.fromkeys(("run_with_hooks", "add_hook", "hooks", "register_forward_hook"), _HOOKS),
    **dict.fromkeys(("trace", "session", "invoke", "forward", "capture", "activations"), _READ),
    **dict.fromkeys(("steer", "intervene"), _STEER),
    **dict.fromkeys(("model", "hf_model", "blocks", "layers", "W_U", "W_E"), _MODEL),
    **dict.fromkeys(("set_control", "reset"), "write llm.generate(…, edits=directions.steer(1.5))"),
    **dict.fromkeys(("fit", "train"), "write Directions.fit(llm, positive, negative)"),
    **dict.fromkeys(("to_tokens", "to_str_tokens", "tokenizer"), "write llm.get_tokenizer()"),
    **dict.fromkeys(("cfg", "config", "hidden_size", "num_layers"), "write llm.info.shape"),
    **dict.fromkeys(("d_model", "n_layers"), "write llm.info.shape"),
    **dict.fromkeys(("attribute", "gradients", "backward"), "write Twin(llm): see attribution.md"),
    "probe": "write llm.generate(prompt, probes=Probe(vector, layer=14))",
    "patch": "write llm.sweep(prompt, source, metric), or edits=Replace(rows, layer=14)",
}


@suggests(_INSTEAD)
class LLM(OfflineSweeps, OfflineQuestions, Evaluations, CachedRuns, llm.LLM):
    """vLLM's offline engine, with midstream enabled."""
