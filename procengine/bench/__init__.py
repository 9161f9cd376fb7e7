"""Measuring a group: what is sent and when (`workload`, `datasets`, `arrivals`), sending it (`run`), what came of it
(`timelines`, `report`, `goodput`, `plot`), two configurations side by side (`compare`), and the parts without a model
(`stages`, `hop`, `startup`). docs/BENCHMARKING.md says what each figure means.
"""
