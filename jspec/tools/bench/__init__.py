"""`jspec bench`: eight commands, declared in `cli`.

step: how far is a decoding step from its floor (`roofline`)? kernels: how far is a kernel? acceptance: how much is
accepted? throughput: tokens a second at a stated acceptance. serve: what does a user get? eval: is the result the same?
startup: how long until an engine serves? inflate: a small pair at a large model's cost.
"""
