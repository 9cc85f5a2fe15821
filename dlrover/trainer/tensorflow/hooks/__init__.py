"""Hooks that scripts add to their own training loops."""
