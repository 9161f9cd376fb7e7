"""Where the time goes, across processes: spans that are always written, and what reads them.

`span_ring` and `records` are what the group's processes use to write; the rest reads, from outside, at any time.
"""
