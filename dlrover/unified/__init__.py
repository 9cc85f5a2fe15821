"""Jobs started from Python on a cluster."""

from dlrover.unified.ray_job import RayJob, RayJobHandle

__all__ = ["RayJob", "RayJobHandle"]
