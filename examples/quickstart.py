"""Quick start in Python: a trained FashionMNIST network becomes a model with a quarter of its weights.

Run it as a script, or cell by cell in an editor that knows ``# %%``.
"""

# %% The data that comes with the repository: a network, 2,000 training images without labels, 10,000 test images.
import argparse
import gzip
import pathlib

import numpy as np

import simplicit

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("simplicit-quickstart"))
out = parser.parse_args().out
data = pathlib.Path(__file__).resolve().parents[1] / "data"


def idx(name):
    raw = gzip.decompress((data / name).read_bytes())
    shape = [int.from_bytes(raw[4 + 4 * k : 8 + 4 * k], "big") for k in range(raw[3])]
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * len(shape)).reshape(shape)


U = idx("fashion_train_images.idx.gz")
U_test, y_test = idx("fashion_test_images.idx.gz"), idx("fashion_test_labels.idx.gz").astype(int)
network = simplicit.Network.from_onnx(data / "fashion_fc.onnx")
print(network)

# %% Train: every parameter of SIM is a flag of `simplicit train`. Bytes become u = raw / 255.
sim = simplicit.SIM(network=network, target_sparsity=0.75, scale=1 / 255).fit(U)
model = sim.model_
print(model)

# %% What it costs and what it knows about itself.
baseline_accuracy = np.mean(network.forward(U_test / 255.0).argmax(1) == y_test)
size, posed = model.sparsity(), model.well_posedness()
print(f"parameters {size.baseline_nonzeros:,} -> {size.nonzeros:,}, {100 * size.sparsity:.1f} % fewer")
print(f"accuracy   {100 * baseline_accuracy:.2f} % -> {100 * sim.score(U_test, y_test):.2f} %")
print(f"acyclic: {posed.acyclic}; one equilibrium for every input: {posed.is_shown}")

# %% The weights are SciPy matrices.
print(f"the five most read pixels: {np.argsort(-np.bincount(model.B.indices, minlength=784))[:5]}")

# %% Model, report and ONNX file.
out.mkdir(exist_ok=True, parents=True)
model.save(out / "model.safetensors")
model.to_onnx(out / "model.onnx")
sim.report(out / "report.html", baseline=network, U=U_test, labels=y_test, title="quick start in Python")
print(f"wrote {out / 'report.html'}")
