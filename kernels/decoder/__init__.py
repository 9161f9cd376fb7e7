"""A whole forward pass of a decoder in one call. Its reference is the model in torch, `models/llama.py`.

Owns: nothing; import the backend's module by name. Never does: arithmetic.
"""
