"""Networks as people have them: torchvision's, Hugging Face's and PyTorch's own transformers, at small sizes."""

import pytest
from conftest import needs

torch = needs("torch")
import networks  # noqa: E402, F401
from torch import nn  # noqa: E402

import simplicit.torch as st  # noqa: E402

FAST = {"bounds": "off", "progress": "none"}

#: Input size, and the layers that are trained: all of them go out and in again, but solving all would take long.
TORCHVISION = {
    "alexnet": (64, ["features.0", "classifier.6"]),
    "vgg11_bn": (32, ["features.0", "features.4", "classifier.6"]),
    "resnet18": (32, ["conv1", "layer1", "fc"]),
    "resnet50": (32, ["conv1", "layer1.0", "fc"]),
    "densenet121": (32, ["features.conv0", "features.denseblock1.denselayer1", "classifier"]),
    "squeezenet1_1": (64, ["features.0", "features.3", "classifier"]),
    "googlenet": (64, ["conv1", "conv2", "inception3a", "fc"]),
    "mobilenet_v2": (32, ["features.0", "features.1", "features.2", "classifier"]),
    "mobilenet_v3_small": (32, ["features.0", "features.1", "features.4", "classifier"]),
    "mnasnet1_0": (32, ["layers.0", "layers.3", "layers.8.0", "classifier"]),
    "shufflenet_v2_x0_5": (32, ["conv1", "stage2", "fc"]),
    "regnet_y_400mf": (32, ["stem", "trunk_output.block1", "fc"]),
    "efficientnet_b0": (32, ["features.0", "features.1", "features.2.0", "classifier"]),
    "convnext_tiny": (32, ["features.0", "features.1.0", "classifier"]),
    "vit_b_16": (32, ["encoder.layers.encoder_layer_0.self_attention.out_proj", "heads"]),
    "swin_t": (64, ["features.0", "features.1.0", "head"]),
}


def rows_of(module):
    """Linear maps by the modules that own them: attention's projections are two."""
    kinds = (nn.Linear, nn.Conv2d)
    return sum(isinstance(m, kinds) for m in module.modules()) + sum(isinstance(m, nn.MultiheadAttention) for m in module.modules())


def required(sparse, module, names):
    layers = sparse.report.layers
    trained = [la for la in layers if la["trained"]]
    assert trained and all(0 <= la["sparsity"] < 1 for la in trained)
    assert 0.05 < sparse.report.trainable_sparsity < 0.99
    assert sparse.report.nonzeros < sparse.report.baseline_nonzeros <= sum(p.numel() for p in module.parameters()) + 10**5
    before, after = module.state_dict(), sparse.module.state_dict()
    changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
    for name in changed:
        assert any(name.startswith(n) for n in names) or "running_mean" in name, name
    assert len(changed) >= len(trained)


@pytest.mark.parametrize("name", TORCHVISION)
def test_torchvision(name):
    models = needs("torchvision").models
    size, include = TORCHVISION[name]
    torch.manual_seed(0)
    options = {"init_weights": True} if name == "googlenet" else {}
    if name == "vit_b_16":
        options = {"image_size": size}
    module = getattr(models, name)(weights=None, num_classes=10, **options).eval()
    networks.shake(module)
    for child in module.modules():
        # Some begin with a head of zeros.
        if isinstance(child, nn.Linear) and not bool(child.weight.any()):
            nn.init.normal_(child.weight, std=0.1)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(24, 3, size, size), torch.zeros(24)), batch_size=12)
    again, source = networks.written_again(module, loader)
    with torch.no_grad():
        u = next(iter(loader))[0]
        y = module(u)
        assert (again(u) - y).norm() < 1e-4 * y.norm()
    # One price for all rows: the search for a target has its tests elsewhere.
    sparse = st.compress(module, loader, mu=1e-4, output_aware=False, cascade="block", include=include, positions=16, **FAST)
    total = source.fixed_nonzeros() + sum(source.count(block) for block in source.trained)
    assert sparse.report.baseline_nonzeros == total
    aux = sum(rows_of(getattr(module, a)) for a in ("aux1", "aux2") if getattr(module, a, None) is not None)
    assert len(sparse.report.layers) == rows_of(module) - aux
    required(sparse, module, include)
    with torch.no_grad():
        assert (sparse.module(u) - y).norm() < 0.5 * y.norm()


def transformers_batches(vocabulary, count=3):
    generator = torch.Generator().manual_seed(0)
    out = []
    for _ in range(count):
        mask = torch.ones(8, 12, dtype=torch.long)
        mask[0, 9:] = 0
        out.append({"input_ids": torch.randint(vocabulary, (8, 12), generator=generator), "attention_mask": mask, "labels": torch.zeros(8)})
    return out


def test_bert():
    hf = needs("transformers")
    torch.manual_seed(0)
    config = hf.BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, max_position_embeddings=16
    )
    module = hf.BertForMaskedLM(config).eval()
    loader = transformers_batches(50)
    sparse = st.compress(module, loader, target_sparsity=0.3, **FAST)
    assert sparse.report.sparsity == pytest.approx(0.3, abs=0.003)
    layers = {la["name"]: la for la in sparse.report.layers}
    # Six in every layer, the head's transform, and the decoder, whose weight is the embedding's.
    assert sum(la["trained"] for la in layers.values()) == 13
    assert [la["why_not"] for la in layers.values() if not la["trained"]] == ["embedding reads it too"]
    required(sparse, module, ["bert.encoder", "cls.predictions.transform"])
    base = hf.BertModel(config).eval()
    values = st.compress(base, loader, mu=1e-3, output_aware=False, cascade="block", exclude="*pooler*", **FAST)
    required(values, base, ["encoder"])


def test_gpt2():
    hf = needs("transformers")
    torch.manual_seed(0)
    config = hf.GPT2Config(vocab_size=50, n_positions=16, n_embd=32, n_layer=2, n_head=4)
    module = hf.GPT2LMHeadModel(config).eval()
    loader = transformers_batches(50)
    sparse = st.compress(module, loader, target_sparsity=0.4, forward_kwargs={"use_cache": False}, **FAST)
    assert sparse.report.sparsity == pytest.approx(0.4, abs=0.003)
    trained = [la["name"] for la in sparse.report.layers if la["trained"]]
    assert len(trained) == 8 and "transformer.h.0.attn.c_attn" in trained
    required(sparse, module, ["transformer.h"])
    fc = sparse.module.transformer.h[0].mlp.c_fc
    assert type(fc).__name__ == "Conv1D" and int((fc.weight == 0).sum()) > 0
    ids = loader[0]["input_ids"]
    with torch.no_grad():
        y = module(ids).logits
        again = networks.written_again(module, loader)[0](ids).logits
    assert (again - y).norm() < 1e-5 * y.norm()
    polished = st.polish(sparse, loader, epochs=2, held_out=loader[:1], progress="none")
    assert polished.kind == "KL" and polished.losses[polished.best] <= polished.losses[0]


@pytest.mark.parametrize("first", [True, False])
def test_transformer_encoder(first):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, norm_first=first)

    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.head = nn.Linear(16, 5)

        def forward(self, x, mask=None):
            return self.head(self.encoder(x, src_key_padding_mask=mask).mean(1))

    module = Classifier().eval()
    for parameter in module.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, 1.0, 0.2)
    loader = [torch.randn(40, 6, 16) for _ in range(3)]
    u = torch.cat(loader)
    sparse = st.compress(module, loader, target_sparsity=0.3, **FAST)
    names = [la["name"] for la in sparse.report.layers]
    assert names[:4] == [f"encoder.layers.0.{n}" for n in ("self_attn.in_proj", "self_attn.out_proj", "linear1", "linear2")]
    assert len(names) == 9 and all(la["trained"] for la in sparse.report.layers)
    with torch.no_grad():
        y = module(u)
        assert (sparse.module(u) - y).norm() < 0.2 * y.norm()
        again, _ = networks.written_again(module, loader)
        assert (again(u) - y).norm() < 1e-5 * y.norm()
    masked = st.compress(module, loader, mu=1e-4, include="head", forward_kwargs={"mask": torch.zeros(40, 6, dtype=torch.bool)}, **FAST)
    assert [la["name"] for la in masked.report.layers] == names


def test_cuda():
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    module = networks.shake(networks.ResNet20(8)).cuda()
    loader = [torch.randn(50, 3, 8, 8, generator=torch.Generator().manual_seed(k)) for k in range(4)]
    sparse = st.compress(module, loader, target_sparsity=0.5, **FAST)
    assert next(sparse.module.parameters()).is_cuda
    on_cpu = st.compress(module.cpu(), loader, target_sparsity=0.5, device="cpu", **FAST)
    u = torch.cat(loader)
    with torch.no_grad():
        y = module(u)
        errors = [float((m.cpu()(u) - y).norm() / y.norm()) for m in (sparse.module, on_cpu.module)]
    assert sparse.report.sparsity == pytest.approx(0.5, abs=0.003)
    assert errors[0] < 1.3 * errors[1]
