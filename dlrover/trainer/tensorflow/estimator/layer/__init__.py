"""
Our Estimator, for TensorFlow 2.16 and newer, which have none. What a user's script names as `tf.estimator.X` is `layer.api.X`.

Graphs, sessions and hooks are TensorFlow's (`tf.compat.v1`); checkpoints have the names and the form of TensorFlow 2.15's Estimator, so either reads
those of the other.
"""
