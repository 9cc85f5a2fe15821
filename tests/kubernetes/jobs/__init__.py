"""
Whole jobs: an ElasticJob, the operator, a master and agents, each a process of its own, started by the commands of the manifests.
"""
