"""What is left to do in a process when parameter servers change: nothing."""
