"""The Slurm batch file, with stand-ins for scontrol and srun: both nodes are this machine."""

import os
import pathlib
import shutil
import signal
import subprocess
import sys

import numpy as np
from conftest import ROOT, needs

import simplicit

ray = needs("ray")

SCONTROL = """#!/bin/sh
[ "$*" = "show hostnames one,two" ] || exit 1
printf 'one\\ntwo\\n'
"""
# A step is a process group of its own, as it is under Slurm.
SRUN = """#!/bin/bash
while [ "${1#-}" != "$1" ]; do
    [ "$1" = -w ] && shift
    shift
done
[ "$1" = ray ] && echo $$ >>"$STEPS"
exec "$@"
"""


def test_the_batch_file_trains_on_two_nodes(tmp_path):
    stand_ins = tmp_path / "bin"
    stand_ins.mkdir()
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN)):
        (stand_ins / name).write_text(text)
        (stand_ins / name).chmod(0o755)
    # Slurm runs a copy from its own directory.
    script = shutil.copy(ROOT / "examples/slurm/train.sbatch", tmp_path / "slurm_script")
    (tmp_path / "net.onnx").write_bytes((ROOT / "data/fashion_fc.onnx").read_bytes())
    images = np.random.default_rng(0).uniform(size=(300, 784)).astype(np.float32)
    np.save(tmp_path / "images.npy", images)
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(stand_ins), str(pathlib.Path(sys.executable).parent), os.environ["PATH"]]),
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_NODELIST": "one,two",
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_CPUS_PER_TASK": "1",
        "STEPS": str(tmp_path / "steps"),
    }
    arguments = ["net.onnx", "images.npy", "model.safetensors", "0.5"]
    try:
        done = subprocess.run(
            ["bash", script, *arguments], env=environment, cwd=tmp_path, timeout=300, stdout=subprocess.PIPE, text=True
        )
    finally:
        # The end of the job is the end of its steps.
        for pid in map(int, (tmp_path / "steps").read_text().split()):
            os.kill(pid, signal.SIGTERM)
    assert done.returncode == 0
    assert "MB" in done.stdout and "TrainReport(" in done.stdout
    here = simplicit.SIM(target_sparsity=0.5).fit(tmp_path / "net.onnx", images).model_
    assert simplicit.ImplicitModel.load(tmp_path / "model.safetensors") == here
