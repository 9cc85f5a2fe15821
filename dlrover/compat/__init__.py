"""
Everything that exists only for scripts of the original DLRover.

`dlrover.python` finds what is here by the table in `dlrover/python/aliases.py`; no other room imports it. It runs in the user's
training process, so nothing here imports gRPC.
"""
