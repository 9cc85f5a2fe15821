"""
A stand-in for Megatron-LM's training package, for tests: same names and rules for files, none of its code.

The real one is not on PyPI and needs CUDA. The directory above has no `__init__`, as with the real one, so `megatron.core` beside it is
the real package where that is installed.
"""
