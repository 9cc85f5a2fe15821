"""Custom resources: definitions, their schemas, and the rules in them."""
