"""This machine: what its kernel tells about processes and allows us, and how to write to its console without standing still. It decides nothing."""
