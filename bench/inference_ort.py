"""Times ONNX Runtime on one thread: python inference_ort.py MODEL.onnx BATCH [BATCH ...]

Prints one line per batch size: the batch and the best seconds of processor time per batch, as
benches/inference.rs measures itself, which runs this script.
"""

import sys
import time

import numpy as np
import onnxruntime

options = onnxruntime.SessionOptions()
options.intra_op_num_threads = 1
options.inter_op_num_threads = 1
options.add_session_config_entry("session.intra_op.allow_spinning", "0")
session = onnxruntime.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
features = session.get_inputs()[0].shape[1:]
random = np.random.default_rng(0)
for batch in map(int, sys.argv[2:]):
    feed = {session.get_inputs()[0].name: random.random((batch, *features), dtype=np.float32)}
    session.run(None, feed)
    best, end = float("inf"), time.perf_counter() + 2.0
    calls = max(1, 16 // batch)
    while time.perf_counter() < end:
        start = time.process_time()
        for _ in range(calls):
            session.run(None, feed)
        best = min(best, (time.process_time() - start) / calls)
    print(batch, best)
