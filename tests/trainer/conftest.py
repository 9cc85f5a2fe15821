# Here, and not in each process that a DataLoader forks: those would import it as their first deed, and a collection of garbage in the middle of
# that may let an import fail (KeyError in importlib's locks).
import numpy.random  # noqa: F401

from tests.agent.conftest import cold_spawner, kept, spawner, tree, tree_options

__all__ = ["cold_spawner", "kept", "spawner", "tree", "tree_options"]
