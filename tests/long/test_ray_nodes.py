"""An engine whose other machine is a node of a Ray cluster, in Ray's own environment."""

import os
import shutil
import subprocess
from pathlib import Path
from tempfile import mkdtemp

from tests.helpers.ray_serve import ENVIRONMENT, PYTHON
from tests.helpers.serving import tiny_engine

# A cluster of two nodes on this machine; each has processes of its own.
PROGRAM = """
import os, signal, sys, time
from pathlib import Path
import ray
from ray.cluster_utils import Cluster
from enginewright import LLM, SamplingParams
from enginewright.errors import EngineDeadError, EngineError

engine, folder = sys.argv[1:]
cluster = Cluster(
    initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False, "temp_dir": folder}
)
cluster.add_node(num_cpus=2)
os.environ["RAY_ADDRESS"] = cluster.address
limits = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "kv_cache_memory": 16 << 20, "threads": 1}
ranks = {"nnodes": 2, "distributed_executor_backend": "ray"}
short = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
endless = SamplingParams(temperature=0, max_tokens=4000, ignore_eos=True)

def answer(llm):
    return llm.generate([[5, 6, 7, 8]], short)[0].outputs[0].token_ids

def actors():
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (folder / "cmdline").read_bytes().startswith(b"ray::_Worker"):
                found.append(int(folder.name))
        except (FileNotFoundError, ProcessLookupError):
            pass
    return found

with LLM(engine, **limits) as llm:
    expected = answer(llm)
for sizes in ({"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}, {"tensor_parallel_size": 4}):
    with LLM(engine, **limits, **ranks, **sizes) as llm:
        assert answer(llm) == expected
        assert len(actors()) == 1
    assert not ray.is_initialized()
print("same answers")

with LLM(engine, **limits, **ranks, tensor_parallel_size=2) as llm:
    stream = llm.stream([5, 6, 7, 8], endless)
    next(stream)
    os.kill(actors()[0], signal.SIGKILL)
    try:
        for _ in stream:
            pass
    except EngineDeadError as error:
        print("lost:", error)
ray.init(log_to_driver=False)
with LLM(engine, **limits, **ranks, tensor_parallel_size=2) as llm:
    assert answer(llm) == expected
assert ray.is_initialized()  # a connection that was there before stays
try:
    LLM(engine, **limits, tensor_parallel_size=3, nnodes=3, distributed_executor_backend="ray")
except EngineError as error:
    print("refused:", error)

def forbidden(*arguments):
    os.unlink(engine)
    return start(*arguments)

from enginewright.runtime.device.ranks.ray_nodes import RayNodes
start, RayNodes.start = RayNodes.start, forbidden
try:
    LLM(engine, **limits, **ranks, tensor_parallel_size=2)
except EngineError as error:
    print("no file:", error)
until = time.monotonic() + 20
while actors() and time.monotonic() < until:
    time.sleep(0.1)
assert not actors()
ray.shutdown()
cluster.shutdown()
print("done")
"""


def test_nodes_of_a_ray_cluster(tmp_path: Path) -> None:
    assert PYTHON.is_file(), "run `make test-long`, which installs Ray"
    engine = tmp_path / "tiny.engine"
    shutil.copy(tiny_engine(), engine)
    folder = mkdtemp(prefix="ray-")  # short: Ray's sockets are in the folder
    try:
        done = subprocess.run(
            [str(PYTHON), "-c", PROGRAM, str(engine), folder],
            env={**os.environ, **ENVIRONMENT},
            capture_output=True,
            text=True,
            timeout=900,
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    said = done.stdout.splitlines()
    assert done.returncode == 0 and said[-1] == "done", done.stderr[-4000:]
    assert "same answers" in said
    assert any(line.startswith("lost:") and "node 1" in line for line in said), said
    assert any(line.startswith("refused: the Ray cluster has 2 nodes, and --nnodes is 3") for line in said), said
    assert any(line.startswith("no file: node 1") and "cannot be opened" in line for line in said), said
