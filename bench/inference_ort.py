"""Times ONNX Runtime on one thread: python inference_ort.py MODEL.onnx BATCH [BATCH ...]

Prints one line per batch size: the batch and the best seconds per batch. Run by benches/inference.rs.
"""

import sys
import time

import numpy as np
import onnxruntime

options = onnxruntime.SessionOptions()
options.intra_op_num_threads = 1
options.inter_op_num_threads = 1
session = onnxruntime.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
features = session.get_inputs()[0].shape[1:]
random = np.random.default_rng(0)
for batch in map(int, sys.argv[2:]):
    feed = {session.get_inputs()[0].name: random.random((batch, *features), dtype=np.float32)}
    session.run(None, feed)
    best, spent = float("inf"), 0.0
    while spent < 0.5:
        start = time.perf_counter()
        for _ in range(10):
            session.run(None, feed)
        seconds = (time.perf_counter() - start) / 10
        best, spent = min(best, seconds), spent + 10 * seconds
    print(batch, best)
