"""Trains and exports data/fashion_cnn.onnx: two convolutions of stride 2 and a linear layer for FashionMNIST.

    python bench/fashion_cnn.py FOLDER OUT.onnx

FOLDER holds the training files (Debian: dataset-fashion-mnist). Needs PyTorch and onnx; another version of PyTorch gives
other weights.
"""

import gzip
import pathlib
import sys

import numpy as np
import torch
from torch import nn


def idx(path, offset):
    return torch.from_numpy(np.frombuffer(gzip.open(path).read(), np.uint8, offset=offset).copy())


def main():
    folder, out = pathlib.Path(sys.argv[1]), sys.argv[2]
    torch.manual_seed(0)
    torch.set_num_threads(1)
    images = idx(folder / "train-images-idx3-ubyte.gz", 16).reshape(-1, 1, 28, 28).float() / 255
    labels = idx(folder / "train-labels-idx1-ubyte.gz", 8).long()
    convolutions = [nn.Conv2d(1, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU()]
    network = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(784, 10))
    adam = torch.optim.Adam(network.parameters(), 2e-3)
    for _ in range(3):
        for batch in torch.randperm(len(images)).split(128):
            loss = nn.functional.cross_entropy(network(images[batch]), labels[batch])
            adam.zero_grad()
            loss.backward()
            adam.step()
    network.eval()
    names = {"input_names": ["u"], "dynamic_axes": {"u": {0: "batch"}}}
    torch.onnx.export(network, (torch.zeros(2, 1, 28, 28),), out, dynamo=False, **names)


if __name__ == "__main__":
    main()
