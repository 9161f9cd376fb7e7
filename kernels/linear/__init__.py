"""Projections. `reference` takes any weights in torch, `native` packed ones; `packed` makes these, free of torch.

Owns: nothing; import the backend's module by name. Never does: arithmetic.
"""
