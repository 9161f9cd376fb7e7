"""Projections. `reference` takes any weights in torch, `triton` those of few bits (`quantized`), `native` packed ones;
`packed` makes these, free of torch.

Owns: nothing; import the backend's module by name. Never does: arithmetic.
"""
