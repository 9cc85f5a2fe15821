"""
A kubelet that runs containers as processes of this machine.

Tests need pods that run, exit, are evicted and lose their machine, and no cluster is at hand. This kubelet takes pods from
any API server, ours or a real one, and runs each container in namespaces of its own: its own root, processes, host name
and network address. It reports what a real kubelet reports, in the same order; `test_kubelet.py` holds that order as text.

Images mean nothing: every image is this machine's file system, with this project's programs on the path.
"""
