"""
Brain, the service that many jobs share: it keeps what they measured, proposes a start to a new job, and divides room between jobs.

It needs the extra `brain`. Jobs never wait for it and import nothing from here; they speak with it over `protocol.rpc.brain`.
"""
