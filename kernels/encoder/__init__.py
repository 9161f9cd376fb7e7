"""A whole forward pass of a bidirectional encoder; in `native` without torch.

Owns: nothing; import the module by name. Never does: arithmetic.
"""
