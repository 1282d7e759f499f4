"""`jspec bench`: eight commands, declared in `cli`.

step: time of a decoding step beside its least possible time (`roofline`). kernels: the same for single kernels.
acceptance: draft tokens accepted a step. throughput: tokens a second at a stated acceptance. serve: latencies of
requests under a load. eval: whether drafting or quantisation changes answers. startup: seconds until an engine serves.
inflate: writes a small trained target and head in a large model's shape.
"""
