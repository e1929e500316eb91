"""One training on an existing Ray cluster: train.py ADDRESS NETWORK.onnx INPUTS.npy MODEL.safetensors [SPARSITY]."""

import sys

import numpy as np

import simplicit
import simplicit.ray

address, network, inputs, out = sys.argv[1:5]
sim = simplicit.SIM(target_sparsity=float(sys.argv[5]) if len(sys.argv) > 5 else 0.8)
simplicit.ray.fit(sim, network, np.load(inputs, mmap_mode="r"), address=address)
sim.model_.save(out)
print(sim.model_, sim.report_, {k: f"{v / 1e6:.1f} MB" for k, v in sim.travelled_.items()}, sep="\n")
