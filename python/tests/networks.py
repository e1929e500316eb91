"""PyTorch modules that several tests use."""

import copy

import torch
from torch import nn
from torch.nn import functional as F

# These modules are tiny: more threads only wait for each other, on a busy machine for long.
torch.set_num_threads(1)


class Block(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.shortcut(x))


class ResNet20(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.conv = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.bn = nn.BatchNorm2d(width)
        sizes = [(width, width, 1)] * 3 + [(width, 2 * width, 2)] + [(2 * width, 2 * width, 1)] * 2
        sizes += [(2 * width, 4 * width, 2)] + [(4 * width, 4 * width, 1)] * 2
        self.blocks = nn.Sequential(*(Block(*size) for size in sizes))
        self.linear = nn.Linear(4 * width, 10)

    def forward(self, x):
        out = self.blocks(F.relu(self.bn(self.conv(x))))
        # As most of them are written.
        out = F.avg_pool2d(out, out.size()[3])
        return self.linear(out.view(out.size(0), -1))


class Mixed(nn.Module):
    """Every kind of window and sum: odd kernels, strides, all poolings, residual sums, dense layers at the end."""

    def __init__(self):
        super().__init__()
        self.one = nn.Conv2d(2, 3, (3, 2), (1, 2), (1, 0))
        self.two = nn.Conv2d(3, 3, 3, padding=1)
        self.pool = nn.AvgPool2d(3, 2, 1, count_include_pad=False)
        self.three = nn.Conv2d(3, 2, 1, bias=False)
        self.four, self.five = nn.Linear(2 * 3 * 2, 4), nn.Linear(4, 2)

    def forward(self, u):
        x = F.leaky_relu(self.one(u), 0.25)
        x = torch.tanh(self.two(F.max_pool2d(x, 3, 1, 1)) + x)
        x = F.relu(self.three(self.pool(x)))
        return self.five(torch.sigmoid(self.four(x.reshape(x.shape[0], -1))))


def shake(module, seed=0):
    """Batch norms with statistics of their own."""
    torch.manual_seed(seed)
    for m in module.modules():
        if isinstance(m, (nn.BatchNorm2d, nn.BatchNorm1d)):
            m.running_mean.normal_(std=0.2)
            m.running_var.uniform_(0.5, 1.5)
            nn.init.uniform_(m.weight, 0.5, 1.5)
            nn.init.normal_(m.bias, std=0.2)
    return module.eval()


def written_again(module, loader):
    """A copy of the module whose own weights went out and in again, batch norms folded and taken apart: nothing changes."""
    from simplicit.torch._batches import Batches
    from simplicit.torch._collect import Evaluating
    from simplicit.torch._find import choose, find
    from simplicit.torch._source import Source

    other = copy.deepcopy(module)
    with Evaluating(module):
        batches = Batches(loader, module, None, None, None)
        found = find(module, batches)
        choose(module, found, None, None)
        source = Source(module, other, found, batches, positions=1, seed=0)
        for k, (_, _, weights, constant, *_) in enumerate(source.blocks()):
            source.install(k, weights, constant)
    return other, source


def batches(*shape, count=5):
    generator = torch.Generator().manual_seed(2)
    return [(torch.randn(100, *shape, generator=generator), torch.zeros(100)) for _ in range(count)]
