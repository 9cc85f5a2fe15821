"""What the kernel of this machine tells about its processes. For all who start, watch or end some; it decides nothing."""
