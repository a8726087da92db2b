"""The engines with sweeps, scores of texts and `tune`."""
