"""The client of the product against an API server."""
