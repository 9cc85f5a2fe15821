"""
An API server for tests: what a Kubernetes API server answers, without a cluster.

Versions, watches, conflicts, grace periods and owner collection are real, because our code depends on them. The suite in
`tests/kubernetes/conformance` asks this server and a real one the same questions.
"""

from tests.kubernetes.server.serving import ApiServer as ApiServer
