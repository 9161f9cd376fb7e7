"""Hidden states of sequences to one vector each; in `reference` by torch, in `native` without it.

Owns: nothing; import the backend's module by name. Never does: arithmetic.
"""
