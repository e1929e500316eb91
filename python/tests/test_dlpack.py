"""Tensors as they lie in memory: of the host here, of a GPU where there is one."""

import numpy as np
import pytest
from conftest import needs

from simplicit import SIM, Network, SettingError, _core

torch = needs("torch")
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture
def images():
    return np.random.default_rng(3).normal(size=(300, 8)).astype(np.float32)


@pytest.fixture
def network():
    rng = np.random.default_rng(4)
    return Network.from_layers([rng.normal(size=(12, 8)), rng.normal(size=(3, 12))])


def trained(network, inputs):
    model, _, _ = _core.train(["--target-sparsity=0.4", "--device=cpu"], network._core, inputs, None)
    return model.to_bytes()


def test_a_capsule_of_the_host_is_read_as_its_array(network, images):
    expected = trained(network, images)
    assert trained(network, torch.from_numpy(images)) == expected
    # Columns of a larger tensor, a transposed one, and one that starts in the middle: strides and offset count.
    wide = torch.zeros(301, 20)
    wide[1:, 3:11] = torch.from_numpy(images)
    assert trained(network, wide[1:, 3:11]) == expected
    assert trained(network, torch.from_numpy(np.ascontiguousarray(images.T)).T) == expected
    images.flags.writeable = False
    assert trained(network, images) == expected
    doubled = torch.from_numpy(images.astype(np.float64))
    assert trained(network, doubled) == expected


def test_what_is_no_array_of_ours_is_one_clear_line(network, images):
    with pytest.raises(ValueError, match="^tensor: expected float32, float64 or uint8 numbers, got float16$"):
        trained(network, torch.from_numpy(images).half())
    with pytest.raises(ValueError, match="^array: expected a float32, float64 or uint8 array of NumPy or DLPack, got list$"):
        trained(network, [[1.0]])
    with pytest.raises(ValueError, match="^tensor: expected one on an NVIDIA GPU, got"):
        _core.read_tensor(torch.from_numpy(images), 0, 1)

    class Elsewhere:
        def __dlpack_device__(self):
            return (8, 0)

    with pytest.raises(ValueError, match="^tensor: expected one in host memory or on an NVIDIA GPU, got device type 8 of DLPack$"):
        trained(network, Elsewhere())


class Described:
    """A tensor on a GPU that is not there."""

    def __init__(self, number):
        self.number = number

    def __dlpack_device__(self):
        return (2, self.number)

    def __len__(self):
        return 300


def test_a_tensor_of_another_gpu_than_the_one_that_trains_is_refused(network):
    with pytest.raises(SettingError, match="^U: expected a tensor on cuda:1, the device of training, got one on cuda:0$"):
        SIM(network=network, target_sparsity=0.4, device="cuda:1").fit(Described(0))


@gpu
def test_training_reads_a_tensor_where_it_lies(network, images):
    there = torch.from_numpy(images).cuda()
    sim = SIM(network=network, target_sparsity=0.4, device="cuda")
    model, expected = sim.fit(there).model_, SIM(network=network, target_sparsity=0.4, device="cuda").fit(images).model_
    assert model.to_bytes() == expected.to_bytes()
    np.testing.assert_array_equal(sim.predict(there), sim.predict(images))
    convolutional = torch.randn(64, 3, 8, 8, device="cuda")
    np.testing.assert_array_equal(_core.read_tensor(convolutional, 5, 9).reshape(4, 3, 8, 8), convolutional[5:9].cpu().numpy())


@gpu
def test_training_reads_feature_maps_where_they_lie(tmp_path):
    torch.manual_seed(0)
    module = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(8, 4)
    )
    images = torch.randn(256, 3, 8, 8)
    file = str(tmp_path / "network.onnx")
    torch.onnx.export(module, (images,), file, dynamo=False, input_names=["u"], dynamic_axes={"u": {0: "n"}})
    network = Network.from_onnx(file)
    settings = dict(network=network, target_sparsity=0.5, device="cuda")
    expected = SIM(**settings).fit(images.numpy()).model_
    assert SIM(**settings).fit(images.cuda()).model_.to_bytes() == expected.to_bytes()


@gpu
def test_a_tensor_that_cannot_be_read_where_it_lies_is_one_clear_line(network, images):
    there = torch.from_numpy(images).cuda()
    sim = SIM(network=network, target_sparsity=0.4, device="cuda")
    with pytest.raises(ValueError, match=r"^tensor on a GPU: expected float32 numbers; convert it with .float\(\), got float64$"):
        sim.fit(there.double())
    with pytest.raises(ValueError, match=r"^tensor on a GPU: expected contiguous numbers; call .contiguous\(\), got strides"):
        sim.fit(there.T.contiguous().T)
    there[5, 2] = float("nan")
    with pytest.raises(ValueError, match="^U: NaN at row 5, column 2"):
        sim.fit(there)
