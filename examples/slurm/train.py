"""One training on a Ray cluster: train.py ADDRESS NODES NETWORK.onnx INPUTS.npy MODEL.safetensors [SPARSITY]."""

import sys
import time

import numpy as np
import ray

import simplicit
import simplicit.ray

address, nodes, network, inputs, out = sys.argv[1:6]
sparsity = float(sys.argv[6]) if len(sys.argv) > 6 else 0.8

ray.init(address=address, log_to_driver=False)
deadline = time.monotonic() + 300
while (alive := sum(node["Alive"] for node in ray.nodes())) < int(nodes):
    if time.monotonic() > deadline:
        sys.exit(f"{alive} of {nodes} nodes joined the cluster at {address} in five minutes")
    time.sleep(1)

sim = simplicit.SIM(target_sparsity=sparsity)
simplicit.ray.fit(sim, network, np.load(inputs, mmap_mode="r"))
sim.model_.save(out)
print(sim.model_, sim.report_, {k: f"{v / 1e6:.1f} MB" for k, v in sim.travelled_.items()}, sep="\n")
