"""Pods: the shape of their fields, defaults, checks, and what happens around their creation."""
