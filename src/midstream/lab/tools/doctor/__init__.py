"""`midstream doctor`: comparison of one model's captures and edits with transformers.

Runs a model, or a small random copy with the same kinds of layers, twice: in transformers with
float32 and plain hooks, and in `midstream.LLM` with every site tapped. Compares every site of every
layer and tests each operation.
"""
