from tests.agent.conftest import cold_spawner, spawner, tree

__all__ = ["cold_spawner", "spawner", "tree"]
