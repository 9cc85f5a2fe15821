"""
What an API server answers, asked over plain HTTP.

The same questions go to our own server and, if `KUBEBUILDER_ASSETS` names a directory with `etcd` and `kube-apiserver`, to a
real one. Where the two differ, ours is wrong.
"""
