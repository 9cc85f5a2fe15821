"""Small things that conf classes name."""
