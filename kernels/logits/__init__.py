"""Changes to logits before sampling: penalties, biases, masks, bans; in `reference` by torch, in `native` without it.

Owns: nothing; import the backend's module by name. Never does: arithmetic.
"""
