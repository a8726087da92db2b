"""Attention weights of chosen queries, computed again from the paged KV cache after a step."""
