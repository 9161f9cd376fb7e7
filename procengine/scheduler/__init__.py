"""Scheduling of one worker: which rows run in the next step. Values in, values out; no clock, no I/O, no torch."""
