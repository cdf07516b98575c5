"""Nodes of a Ray cluster in place of machines that run `engine worker` (https://docs.ray.io): an actor on each."""

import logging
from pathlib import Path
from typing import Any

from enginewright.errors import EngineError, UsageError
from enginewright.runtime.config import RAY, RuntimeConfig
from enginewright.runtime.engine import Engine

logger = logging.getLogger(__name__)

OPTION = f"--distributed-executor-backend {RAY}"


class RayNodes:
    """Actors that compute with this process, each on a node of its own and not on this one.

    Args:
        config: limits, with `nnodes` above 1.

    Raises:
        UsageError: Ray is not installed, or there is no cluster, or it has too few nodes.
    """

    def __init__(self, config: RuntimeConfig) -> None:
        self._ray, self._is_own = _connect()
        self._config = config
        self._actors: list[Any] = []
        self._ended: dict[Any, str] = {}  # reference to the result of an actor → its name
        try:
            self._nodes = _choose(self._ray, config.nnodes - 1)
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> str:
        """The address of this node, by which the others reach it."""
        return str(self._ray.util.get_node_ip_address())

    def start(self, engine: Engine, host: str, port: int, secret: bytes) -> None:
        """Lets the actors join this process.

        Args:
            engine: the engine, whose file has the same path on all nodes.
            host: address of this machine.
            port: TCP port.
            secret: the secret that all of them know.
        """
        strategy = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        here = self._config.num_ranks // self._config.nnodes
        for number, node in enumerate(self._nodes, 1):
            threads = self._config.threads
            cpus = threads * here if threads else node["Resources"].get("CPU", 1)
            options = {"num_cpus": cpus, "max_restarts": 0, "scheduling_strategy": strategy(node["NodeID"], soft=False)}
            actor = self._ray.remote(_Worker).options(**options).remote()
            self._actors.append(actor)
            path = str(Path(engine.file.path).absolute())
            ended = actor.work.remote(path, host, port, number, secret, threads)
            self._ended[ended] = f"node {number} ({node['NodeManagerAddress']})"

    def check(self) -> None:
        """Checks that all actors are there.

        Raises:
            EngineError: one has ended; the message has its reason.
        """
        ended, _ = self._ray.wait(list(self._ended), timeout=0)
        for one in ended:
            try:
                what, why, fix = self._ray.get(one)
            except self._ray.exceptions.RayError as error:
                what, why, fix = "its actor has ended", str(error).partition("\n")[0], "See the logs of Ray."
            raise EngineError(f"{self._ended[one]}: {what}", why, fix)

    def close(self) -> None:
        """Ends the actors, and with them their ranks."""
        for actor in self._actors:
            self._ray.kill(actor)
        self._actors.clear()
        self._ended.clear()
        if self._is_own:
            self._is_own = False
            self._ray.shutdown()


class _Worker:
    """The actor of a node: it does what `engine worker` does."""

    def work(self, path: str, host: str, port: int, node: int, secret: bytes, threads: int | None) -> tuple[str, ...]:
        """Computes with node 0 until it is killed. Returns the parts of the error that has ended it before."""
        from enginewright.runtime.device.ranks.node import work

        try:
            work(Path(path), host, port, node, secret, threads, logger.info)
        except EngineError as error:
            return error.what, error.why, error.fix
        raise AssertionError("work ends by an error alone")


def _connect() -> tuple[Any, bool]:
    """Connects to the cluster of this machine; returns Ray's module, and True if nobody had connected to it before."""
    try:
        import ray
        import ray.util.scheduling_strategies  # not imported by `import ray`
    except ImportError as error:
        fix = "Install it: pip install 'enginewright[ray]'."
        raise UsageError(f"{OPTION} needs Ray", str(error), fix) from error
    if ray.is_initialized():
        return ray, False
    try:
        ray.init(address="auto", log_to_driver=False, configure_logging=False)
    except ConnectionError as error:
        fix = "Start one: `ray start --head` here, and `ray start --address HOST:PORT` on the other machines."
        raise UsageError(f"{OPTION} needs a Ray cluster", "none was found from this machine", fix) from error
    return ray, True


def _choose(ray: Any, count: int) -> list[dict[str, Any]]:
    """Chooses nodes for actors, those with the most cores first."""
    own = ray.get_runtime_context().get_node_id()
    others = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] != own]
    if len(others) < count:
        raise UsageError(
            f"the Ray cluster has {len(others) + 1} nodes, and --nnodes is {count + 1}",
            "each machine of the engine is a node of its own",
            "Add nodes with `ray start --address HOST:PORT`, or use a smaller --nnodes.",
        )
    others.sort(key=lambda node: (-node["Resources"].get("CPU", 0), node["NodeID"]))
    return others[:count]
