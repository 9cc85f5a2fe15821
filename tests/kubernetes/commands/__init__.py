"""`dlrover job` against an API server."""
