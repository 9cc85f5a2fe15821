"""The graph runtime: sessions, hooks and checkpoints of `tf.compat.v1`."""
