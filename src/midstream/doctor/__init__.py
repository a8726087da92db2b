"""`midstream doctor`: whether midstream reads and edits one model as transformers has it.

A model, or a small random copy of it with the same kinds of layers, is run twice: by
transformers in float32 with plain hooks, and by `midstream.LLM` with every site tapped. Every
site of every layer is compared, and each operation is tried.
"""
