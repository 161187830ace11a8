"""One of two processes of a JAX program, with one CPU device each: python process.py RANK PORT FOLDER

Arrays that are replicated are published by process 0 and synced by both; one of which each has a part is refused.
"""

import sys

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pulsesync.errors import StateError
from pulsesync.integrations.jax import JaxPublisher, JaxSubscriber

rank, port, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=rank, initialization_timeout=60)
mesh = Mesh(np.array(jax.devices()), ("x",))
assert len(jax.devices()) == 2
assert len(jax.local_devices()) == 1


def made(values: np.ndarray, *spec: str) -> jax.Array:
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])


trained = np.arange(64, dtype=np.float32)
if rank == 0:
    with JaxPublisher(folder) as publisher:
        publisher.publish({"w": made(trained)})
        try:
            publisher.publish({"w": made(trained, "x")})
        except StateError as e:
            print(f"refused: {e}")
params = {"w": made(np.zeros(64, np.float32))}
with JaxSubscriber(folder) as subscriber:
    got = subscriber.sync(params, wait_s=60)
assert got["w"].sharding == params["w"].sharding
assert not got["w"].is_fully_addressable
print("synced:", np.array_equal(np.asarray(got["w"].addressable_data(0)), trained))
jax.distributed.shutdown()
