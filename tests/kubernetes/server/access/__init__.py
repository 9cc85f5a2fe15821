"""Who asks, and may they: tokens and roles."""
