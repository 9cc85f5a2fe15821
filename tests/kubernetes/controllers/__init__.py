"""
What a cluster has beside its API server and its kubelets, as far as jobs need it, and only where no real one runs.

Scheduler, node lifecycle, pod collection, names and service addresses. Each is a small loop over the API, so each works with
our server and with a real one.
"""
