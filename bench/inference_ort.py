"""Times ONNX Runtime: python inference_ort.py MODEL.onnx THREADS BATCH [BATCH ...]

Prints one line per batch size: the batch and seconds per batch. On one thread the best processor time, as
benches/inference.rs measures itself, which runs this script; on several the median by the clock on the wall.
"""

import sys
import time

import numpy as np
import onnxruntime

threads = int(sys.argv[2])
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = threads
options.inter_op_num_threads = 1
options.add_session_config_entry("session.intra_op.allow_spinning", "0" if threads == 1 else "1")
session = onnxruntime.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
features = session.get_inputs()[0].shape[1:]
random = np.random.default_rng(0)
clock = time.process_time if threads == 1 else time.perf_counter
for batch in map(int, sys.argv[3:]):
    feed = {session.get_inputs()[0].name: random.random((batch, *features), dtype=np.float32)}
    session.run(None, feed)
    times, end = [], time.perf_counter() + 1.0
    calls = max(1, 16 // batch) if threads == 1 else 1
    while len(times) < 3 or time.perf_counter() < end:
        start = clock()
        for _ in range(calls):
            session.run(None, feed)
        times.append((clock() - start) / calls)
    times.sort()
    print(batch, times[0] if threads == 1 else times[len(times) // 2])
