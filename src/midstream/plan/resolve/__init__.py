"""Resolution of plans against a model and a prompt, and the encoding sent to workers."""
