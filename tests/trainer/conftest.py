from tests.agent.conftest import spawner, tree

__all__ = ["spawner", "tree"]
