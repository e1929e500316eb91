"""The Slurm batch file, with stand-ins for scontrol and srun: both nodes are this machine."""

import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile

import numpy as np
import pytest
from conftest import ROOT, needs

import simplicit

ray = needs("ray")

SCONTROL = """#!/bin/sh
[ "$*" = "show hostnames one,two" ] || exit 1
printf 'one\\ntwo\\n'
"""
SRUN = """#!/bin/bash
while [ "${1#-}" != "$1" ]; do
    [ "$1" = -w ] && shift
    shift
done
[ "$1" = ray ] && echo $$ >>"$STEPS"
exec "$@"
"""


@pytest.fixture
def short():
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        yield folder


def test_the_batch_file_trains_on_two_nodes(network, U, tmp_path, short):
    stand_ins = tmp_path / "bin"
    stand_ins.mkdir()
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN)):
        (stand_ins / name).write_text(text)
        (stand_ins / name).chmod(0o755)
    # Slurm runs a copy from its own directory.
    script = shutil.copy(ROOT / "examples/slurm/train.sbatch", tmp_path / "slurm_script")
    network.to_implicit().to_onnx(tmp_path / "net.onnx")
    np.save(tmp_path / "inputs.npy", U)
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(stand_ins), str(pathlib.Path(sys.executable).parent), os.environ["PATH"]]),
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_NODELIST": "one,two",
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_CPUS_PER_TASK": "1",
        # Not pytest's: names of sockets must be short.
        "RAY_TMPDIR": short,
        "STEPS": str(tmp_path / "steps"),
    }
    arguments = ["net.onnx", "inputs.npy", "model.safetensors", "0.5"]
    # Files, not pipes: what the steps still hold open does not keep us waiting.
    said, steps = tmp_path / "slurm.out", tmp_path / "steps"
    try:
        with said.open("w") as out:
            command = ["bash", script, *arguments]
            done = subprocess.run(command, env=environment, cwd=tmp_path, timeout=600, stdout=out, stderr=out)
    finally:
        # The end of the job is the end of its steps.
        for pid in map(int, steps.read_text().split() if steps.exists() else ()):
            os.kill(pid, signal.SIGTERM)
    text = said.read_text()
    assert done.returncode == 0, text
    assert "TrainReport(" in text and "MB" in text and len(steps.read_text().split()) == 2, text
    here = simplicit.SIM(target_sparsity=0.5).fit(tmp_path / "net.onnx", U).model_
    assert simplicit.ImplicitModel.load(tmp_path / "model.safetensors") == here
